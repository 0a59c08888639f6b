"""Storage whose writers are killed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.page_stores import read_one
from tests.integration.storage_crowd import LIMIT, WRITERS
from tests.integration.storage_killer import SIZE, content_of
from workers.hicache.storage import sweeper
from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.sweeper import UNFINISHED

pytestmark = pytest.mark.integration


def test_no_torn_object_is_left_by_writers_that_were_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [sys.executable, "-m", "tests.integration.storage_killer", str(tmp_path), "200"]
    num_unfinished = int(subprocess.run(arguments, check=True, timeout=280, capture_output=True).stdout)
    assert num_unfinished, "no writer was killed while it wrote"
    storage = FileStorage(tmp_path, 1 << 30, fsync=False)
    monkeypatch.setattr(sweeper, "_ABANDONED_S", -1.0)
    storage.sweeper.sweep()
    names = [path.name for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert names, "nothing was written before the writers were killed"
    buffer = memoryview(bytearray(SIZE))
    for name in names:
        assert read_one(storage, f"n/{name}", [buffer])
        assert bytes(buffer) == content_of(int(name))
    assert not list(tmp_path.rglob(f"{UNFINISHED}*"))


def test_a_folder_stays_near_its_limit_whoever_writes_to_it_and_is_killed(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "tests.integration.storage_crowd", str(tmp_path), "150"]
    lines = subprocess.run(arguments, check=True, timeout=280, capture_output=True, text=True).stdout.splitlines()
    peaks = [int(line) for line in lines]
    # Each writer begins with a sweep, and sweeps again after a 64th of the limit.
    assert sorted(peaks)[len(peaks) // 2] <= 2 * LIMIT, f"{WRITERS} writers outrun the sweeps"
    assert sum(peak > LIMIT // 2 for peak in peaks) > len(peaks) // 2, "writers were never near the limit"
    storage = FileStorage(tmp_path, LIMIT, fsync=False)
    storage.sweeper.sweep()
    assert storage.figures().used_bytes <= LIMIT * 0.9
