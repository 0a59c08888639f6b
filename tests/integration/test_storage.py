"""Storage whose writers are killed, and storage that is slow and fails while requests come."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.page_stores import read_one
from tests.integration.storage_crowd import LIMIT, OBJECT_BYTES, bytes_in
from tests.integration.storage_killer import SIZE, content_of
from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.interface import write_one

pytestmark = pytest.mark.integration


def test_no_torn_object_is_left_by_writers_that_were_killed(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "tests.integration.storage_killer", str(tmp_path), "200"]
    num_unfinished = int(subprocess.run(arguments, check=True, timeout=280, capture_output=True).stdout)
    storage = FileStorage(tmp_path, 1 << 30, fsync=False)
    storage.tidy()
    names = [path.name for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert names, "nothing was written before the writers were killed"
    buffer = memoryview(bytearray(SIZE))
    for name in names:
        assert read_one(storage, f"n/{name}", [buffer])
        assert bytes(buffer) == content_of(int(name))
    assert num_unfinished, "no writer was killed while it wrote"
    assert leftovers(tmp_path) == []


def test_a_folder_stays_within_its_limit_whoever_writes_to_it_and_is_killed(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "tests.integration.storage_crowd", str(tmp_path), "150"]
    lines = subprocess.run(arguments, check=True, timeout=280, capture_output=True, text=True).stdout.splitlines()
    peaks = [int(line) for line in lines]
    assert max(peaks) <= LIMIT, "a folder had more than its limit"
    assert sum(peak > LIMIT // 2 for peak in peaks) > len(peaks) // 2, "writers were never at the limit"
    storage = FileStorage(tmp_path, LIMIT, fsync=False)
    storage.tidy()
    assert leftovers(tmp_path) == []
    assert storage.figures().used_bytes == bytes_in(tmp_path)
    write_one(storage, "n/one-more", [memoryview(bytes(OBJECT_BYTES))])
    assert bytes_in(tmp_path) <= LIMIT


def leftovers(folder: Path) -> list[str]:
    """What killed writers have left."""
    return [path.name for kind in ("unfinished", "claim") for path in folder.rglob(f".{kind}-*")]
