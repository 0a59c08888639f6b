"""Storage whose writers are killed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.page_stores import read_one
from tests.integration.storage_crowd import LIMIT, OBJECT_BYTES
from tests.integration.storage_killer import SIZE, content_of
from workers.hicache.storage import sweeper
from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.interface import StorageObject
from workers.hicache.storage.sweeper import UNFINISHED

pytestmark = pytest.mark.integration


def test_killed_writers_leave_no_torn_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [sys.executable, "-m", "tests.integration.storage_killer", str(tmp_path), "200"]
    num_unfinished = int(subprocess.run(arguments, check=True, timeout=280, capture_output=True).stdout)
    assert num_unfinished, "no writer was killed while it wrote"
    storage = FileStorage(tmp_path, 1 << 30)
    monkeypatch.setattr(sweeper, "_ABANDONED_S", -1.0)
    storage.sweeper.sweep()
    names = [path.name for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert names, "nothing was written before the writers were killed"
    buffer = memoryview(bytearray(SIZE))
    for name in names:
        assert read_one(storage, f"n/{name}", [buffer])
        assert bytes(buffer) == content_of(int(name))
    assert not list(tmp_path.rglob(f"{UNFINISHED}*"))


def test_a_folder_is_swept_after_killed_sweepers(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "tests.integration.storage_crowd", str(tmp_path), "50"]
    subprocess.run(arguments, check=True, timeout=280)
    storage = FileStorage(tmp_path, LIMIT)
    storage.sweeper.sweep()
    objects = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert {path.stat().st_size for path in objects} <= {OBJECT_BYTES}
    assert OBJECT_BYTES * len(objects) <= storage.figures().used_bytes <= LIMIT * 0.9
    assert not any(storage.write([StorageObject("n/one-more", [memoryview(bytes(OBJECT_BYTES))])]))
