"""Storage whose writers are killed, and storage that is slow and fails while requests come."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.page_stores import read_one
from tests.integration.storage_killer import SIZE, content_of
from workers.hicache.storage.files import FileStorage

pytestmark = pytest.mark.integration


def test_no_torn_object_is_left_by_writers_that_were_killed(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "tests.integration.storage_killer", str(tmp_path), "200"]
    subprocess.run(arguments, check=True, timeout=280)
    storage = FileStorage(tmp_path, 1 << 30, fsync=False)
    names = [path.name for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert names, "nothing was written before the writers were killed"
    buffer = memoryview(bytearray(SIZE))
    for name in names:
        assert read_one(storage, f"n/{name}", [buffer])
        assert bytes(buffer) == content_of(int(name))
    assert list(tmp_path.rglob(".unfinished-*")), "no writer was killed while it wrote"
