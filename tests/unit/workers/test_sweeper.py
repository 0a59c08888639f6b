"""The soft limit of a storage folder: what is removed and what is kept."""

import fcntl
import os
import shutil
import threading
from pathlib import Path

import pytest

from tests.fakes.page_stores import read_one
from workers.hicache.storage import sweeper
from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.interface import StorageObject, Written
from workers.hicache.storage.sweeper import UNFINISHED

SIZE = 100
LIMIT = 10 * SIZE


def files(folder: Path, max_bytes: int = LIMIT) -> FileStorage:
    return FileStorage(folder, max_bytes)


def write(storage: FileStorage, *names: object) -> list[Written]:
    return storage.write([StorageObject(f"n/{name}", [memoryview(bytes(SIZE))]) for name in names])


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and path.name != ".key"}


def age(folder: Path, name: str, age_s: float) -> None:
    (path,) = (path for path in folder.rglob(name) if path.is_file())
    then_s = path.stat().st_mtime - age_s
    os.utime(path, (then_s, then_s))


def test_a_sweep_leaves_the_most_recently_used_objects(tmp_path: Path) -> None:
    storage = files(tmp_path)
    write(storage, *range(12))
    for number in range(12):
        age(tmp_path, str(number), 1000 - number)
    assert read_one(storage, "n/0", [memoryview(bytearray(SIZE))])
    assert storage.present({"n/1": 0, "n/2": 0, "n/none": 0}) == ["n/1", "n/2"]
    assert storage.figures().used_bytes == 12 * SIZE
    storage.sweeper.sweep()
    assert names_in(tmp_path) == {"0", "1", "2", *map(str, range(6, 12))}
    figures = storage.figures()
    assert (figures.used_bytes, figures.num_evicted, figures.evicted_bytes) == (9 * SIZE, 3, 3 * SIZE)
    storage.sweeper.sweep()
    assert len(names_in(tmp_path)) == 9


def test_the_end_of_a_prompt_is_evicted_before_its_beginning(tmp_path: Path) -> None:
    """The order holds although a prompt's pages are written and read from the first one on."""
    storage = files(tmp_path)
    prompt = [StorageObject(f"n/{depth:02}", [memoryview(bytearray(SIZE))], depth) for depth in range(15)]
    for _ in range(3):
        assert storage.write(prompt) == [None] * len(prompt)
        storage.sweeper.sweep()
        assert storage.present({item.name: item.depth for item in prompt}) == [item.name for item in prompt[:9]]
        assert storage.read(prompt[:9]) == [True] * 9
    another = [StorageObject(f"n/a{depth}", [memoryview(bytearray(SIZE))], depth) for depth in range(4)]
    assert storage.write(another) == [None] * len(another)
    storage.sweeper.sweep()
    left = storage.present({item.name: 0 for item in (*another, *prompt)})
    assert left == [item.name for item in (*another, *prompt[:5])]


def test_a_full_disk_frees_space_far_below_the_limit(tmp_path: Path) -> None:
    storage = files(tmp_path, 1 << 20)
    write(storage, *range(10))
    age(tmp_path, "7", 1000)
    storage.sweeper.note_disk_full()
    for _ in range(2):
        storage.sweeper.sweep()
        assert names_in(tmp_path) == {*map(str, range(10))} - {"7"}


def test_foreign_files_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    storage = files(tmp_path)
    write(storage, "ab1")
    target = tmp_path / "n" / "ab" / "target"
    foreign = [tmp_path / "large", tmp_path / "n" / "large", target, tmp_path / "n" / "ab" / "deep" / "ab2"]
    foreign[-1].parent.mkdir()
    for path in foreign:
        path.write_bytes(bytes(LIMIT))
    storage.sweeper.sweep()
    assert storage.figures().used_bytes == SIZE
    assert all(path.exists() for path in (*foreign, tmp_path / "n" / "ab" / "ab1"))


def test_unfinished_files_count_until_they_are_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = files(tmp_path)
    write(storage, "aa")
    unfinished = tmp_path / "n" / "aa" / f"{UNFINISHED}x-aa"
    unfinished.write_bytes(bytes(SIZE))
    os.utime(unfinished, (0, 0))
    storage.sweeper.sweep()
    assert storage.figures().used_bytes == 2 * SIZE
    monkeypatch.setattr(sweeper, "_ABANDONED_S", -1.0)
    storage.sweeper.sweep()
    assert names_in(tmp_path) == {"aa"}


def test_foreign_files_neither_stop_sweeps_nor_evict_objects(tmp_path: Path) -> None:
    storage, elsewhere = files(tmp_path / "kv"), tmp_path / "elsewhere" / "ab"
    write(storage, *range(12))
    folder = tmp_path / "kv" / "n" / "0"
    (folder / f"{UNFINISHED}folder").mkdir()
    (folder / "0-link").symlink_to(folder / "0")
    elsewhere.mkdir(parents=True)
    (elsewhere / "ab").write_bytes(bytes(LIMIT))
    (tmp_path / "kv" / "link").symlink_to(elsewhere.parent)
    (tmp_path / "kv" / "n" / "ab").symlink_to(elsewhere)
    for name in ("0-huge", f"{UNFINISHED}huge"):
        (folder / name).touch()
        os.truncate(folder / name, 1 << 40)
    (tmp_path / "kv" / ".key").unlink()
    (tmp_path / "kv" / ".key").symlink_to(elsewhere / "ab")
    storage.sweeper.sweep()
    left = names_in(tmp_path / "kv")
    assert not {name for name in left if "huge" in name}
    assert len(left & {*map(str, range(12))}) == 9
    assert storage.figures().used_bytes == 9 * SIZE
    assert (elsewhere / "ab").read_bytes() == bytes(LIMIT)


def test_one_process_sweeps_at_a_time(tmp_path: Path) -> None:
    storage = files(tmp_path)
    write(storage, *range(12))
    thread = threading.Thread(target=storage.sweeper.sweep)
    with (tmp_path / ".key").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread.start()
        assert write(storage, 12) == [None], "a writer waits for nobody"
        assert len(names_in(tmp_path)) == 13
    thread.join(10.0)
    assert len(names_in(tmp_path)) == 9


def test_a_sweep_is_due_after_some_writes_and_the_last_ends_with_the_storage(tmp_path: Path) -> None:
    storage = files(tmp_path, 64 * SIZE)
    sweeper_ = storage.sweeper
    write(storage, 0)
    assert sweeper_._due.is_set()
    sweeper_.sweep()
    assert not sweeper_._due.is_set()
    storage.start_sweeper()
    storage.close()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "hicache-sweep")
    thread.join(10.0)
    assert not thread.is_alive()


def test_a_vanished_folder_is_created_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = files(tmp_path / "kv")
    shutil.rmtree(tmp_path / "kv")
    assert write(storage, *range(12)) == [None] * 12
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "kv").touch()
    storage.sweeper.sweep()
    assert "cannot sweep" in caplog.text
