"""The soft limit of a folder: what is swept, and what is left alone."""

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes.page_stores import read_one
from workers.hicache.storage import sweeper
from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.folders import try_locked
from workers.hicache.storage.interface import StorageObject, Written
from workers.hicache.storage.sweeper import LOCK, UNFINISHED

SIZE = 100
LIMIT = 10 * SIZE


def files(folder: Path, max_bytes: int = LIMIT) -> FileStorage:
    return FileStorage(folder, max_bytes)


def write(storage: FileStorage, *names: object) -> list[Written]:
    return list(storage.write([StorageObject(f"n/{name}", [memoryview(bytes(SIZE))]) for name in names]))


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and path.name != LOCK}


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
    assert write(storage, 1) == [None]
    assert storage.present({"n/2": 0, "n/none": 0}) == ["n/2"]
    assert storage.count_leading(["n/3"]) == 1
    assert storage.figures().used_bytes == 12 * SIZE
    assert storage.sweeper.sweep()
    assert names_in(tmp_path) == {"0", "1", "2", *map(str, range(6, 12))}
    figures = storage.figures()
    assert (figures.used_bytes, figures.num_evicted, figures.evicted_bytes) == (9 * SIZE, 3, 3 * SIZE)
    assert storage.sweeper.sweep()
    assert len(names_in(tmp_path)) == 9


def test_the_end_of_a_prompt_goes_before_its_beginning(tmp_path: Path) -> None:
    """This holds although its pages are written, and read, from the first one on."""
    storage = files(tmp_path)
    prompt = [StorageObject(f"n/{depth:02}", [memoryview(bytearray(SIZE))], depth) for depth in range(15)]
    for _ in range(3):
        storage.present({item.name: item.depth for item in prompt})
        assert list(storage.write(prompt)) == [None] * len(prompt)
        storage.sweeper.sweep()
        assert storage.count_leading([item.name for item in prompt]) == len(names_in(tmp_path)) == 9
        assert list(storage.read(prompt[:9])) == [True] * 9
    another = [StorageObject(f"n/a{depth}", [memoryview(bytearray(SIZE))], depth) for depth in range(4)]
    assert list(storage.write(another)) == [None] * len(another)
    storage.sweeper.sweep()
    assert storage.count_leading([item.name for item in another]) == len(another)
    assert storage.count_leading([item.name for item in prompt]) == 5


def test_a_full_disk_makes_room_although_the_limit_is_far_away(tmp_path: Path) -> None:
    storage = files(tmp_path, 1 << 20)
    write(storage, *range(10))
    age(tmp_path, "7", 1000)
    storage.sweeper.note_disk_full()
    for _ in range(2):
        storage.sweeper.sweep()
        assert names_in(tmp_path) == {*map(str, range(10))} - {"7"}


def test_times_to_come_say_nothing(tmp_path: Path) -> None:
    """The clock was set back: new objects are not evicted for older ones."""
    storage = files(tmp_path)
    write(storage, *range(10))
    for number in range(10):
        age(tmp_path, str(number), -86_400.0)
    write(storage, *"abc")
    storage.sweeper.sweep()
    assert storage.present(dict.fromkeys(["n/a", "n/b", "n/c"], 0)) == ["n/a", "n/b", "n/c"]
    assert len(names_in(tmp_path)) == 9


def test_foreign_files_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    storage = files(tmp_path)
    write(storage, "ab1")
    target = tmp_path / "n" / "ab" / "target"
    foreign = [tmp_path / "large", tmp_path / "n" / "large", target, tmp_path / "n" / "ab" / "deep" / "ab2"]
    foreign[-1].parent.mkdir()
    for path in foreign:
        path.write_bytes(bytes(LIMIT))
    (tmp_path / "n" / "ab" / "ab3").symlink_to(target)
    os.mkfifo(tmp_path / "n" / "ab" / "ab4")
    (tmp_path / "link").symlink_to(tmp_path / "n")
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


def test_one_process_sweeps_at_a_time(tmp_path: Path) -> None:
    storage = files(tmp_path)
    write(storage, *range(12))
    with try_locked(tmp_path / LOCK) as is_ours:
        assert is_ours
        assert not storage.sweeper.sweep()
        assert len(names_in(tmp_path)) == 12
        assert write(storage, 12) == [None], "a writer waits for nobody"
    assert storage.sweeper.sweep()
    assert len(names_in(tmp_path)) == 9


def test_a_sweep_is_due_now_and_then_and_ends_with_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = files(tmp_path, 64 * SIZE)
    rounds = iter([(), range(1), range(1, 3), range(3, 5)])
    waits = list[tuple[bool, float]]()

    def wait(timeout_s: float) -> bool:
        numbers = next(rounds, None)
        if numbers is None:
            storage.close()
        else:
            write(storage, *numbers)
        waits.append((due.is_set(), timeout_s))
        return due.is_set()

    due, sweeps, sweep = storage.sweeper._due, list[int](), storage.sweeper.sweep
    monkeypatch.setattr(due, "wait", wait)

    def count_and_sweep() -> bool:
        sweeps.append(storage.figures().used_bytes)
        return sweep()

    monkeypatch.setattr(storage.sweeper, "sweep", count_and_sweep)
    storage.maintain()
    assert sweeps == [0, SIZE, 3 * SIZE, 5 * SIZE], "nothing is swept that nobody has written to"
    assert waits == [(False, 600.0), (True, 600.0), (True, 600.0), (True, 600.0), (True, 600.0)]


def test_a_sweep_waits_for_that_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, pauses = files(tmp_path), list[float]()
    write(storage, *range(12))
    with ExitStack() as other:
        assert other.enter_context(try_locked(tmp_path / LOCK))

        def pause(timeout_s: float) -> bool:
            pauses.append(timeout_s)
            if len(pauses) == 3:
                other.close()
            return False

        monkeypatch.setattr(storage.sweeper._closed, "wait", pause)
        monkeypatch.setattr(storage.sweeper._due, "wait", lambda _: storage.close())
        storage.maintain()
    assert (pauses, len(names_in(tmp_path))) == ([1.0] * 3, 9)


def test_a_folder_that_vanished_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = files(tmp_path / "kv")
    shutil.rmtree(tmp_path / "kv")
    storage.sweeper.sweep()
    assert write(storage, *range(12)) == [None] * 12
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "kv").touch()
    assert storage.sweeper.sweep()
    assert "cannot sweep" in caplog.text
