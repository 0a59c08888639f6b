"""The limit of a folder: never exceeded, and right again whatever was done to its files or to those who wrote them."""

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.page_stores import read_one
from workers.hicache.storage import space
from workers.hicache.storage.claims import Claim
from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.folders import locked
from workers.hicache.storage.interface import StorageError, StorageObject, Written, write_one

SIZE = 100
LIMIT = 10 * SIZE


def files(folder: Path, max_bytes: int = LIMIT, *, fsync: bool = False) -> FileStorage:
    storage = FileStorage(folder, max_bytes, fsync=fsync)
    storage.tidy()
    return storage


def write(storage: FileStorage, *names: object) -> list[Written]:
    return list(storage.write([StorageObject(f"n/{name}", [memoryview(bytes(SIZE))]) for name in names]))


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and path.name not in {".lock", ".used"}}


def counted(folder: Path) -> int:
    return int.from_bytes((folder / ".used").read_bytes(), "little")


def age(folder: Path, name: str, age_s: float) -> None:
    (path,) = (path for path in folder.rglob(name) if path.is_file())
    then_s = path.stat().st_mtime - age_s
    os.utime(path, (then_s, then_s))


def test_many_threads_of_many_backends_stay_within_the_limit(tmp_path: Path) -> None:
    failed: list[object] = []

    def run(number: int) -> None:
        storage = files(tmp_path)
        for turn in range(10):
            failed.extend(error for error in write(storage, f"{number}a{turn}", f"{number}b{turn}") if error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert 1 <= len(names_in(tmp_path)) <= 10
    assert counted(tmp_path) <= LIMIT
    assert files(tmp_path).figures().used_bytes == counted(tmp_path) == SIZE * len(names_in(tmp_path))


def test_room_is_claimed_before_it_is_taken_and_given_back_by_whoever_takes_no_more(tmp_path: Path) -> None:
    storage, other = files(tmp_path, 1 << 20), files(tmp_path, 1 << 20)
    objects = [StorageObject(f"n/{number}", [memoryview(bytes(SIZE))]) for number in range(5)]
    writes = iter(storage.write(objects))
    assert next(writes) is None
    assert counted(tmp_path) == 5 * SIZE
    assert files(tmp_path, 1 << 20).figures().used_bytes == 6 * SIZE, "of a claim nobody knows how much is written"
    del writes
    assert names_in(tmp_path) == {"0"}
    write(other, 9)
    assert files(tmp_path).figures().used_bytes == counted(tmp_path) == 2 * SIZE


def test_what_was_not_written_is_given_back(tmp_path: Path) -> None:
    storage = files(tmp_path)
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "aa").write_text("a file where a folder should be")
    assert [type(error) for error in write(storage, "aa", "bb", "aac")] == [StorageError, type(None), StorageError]
    assert counted(tmp_path) == SIZE


def test_a_claim_counts_as_long_as_its_process_lives(tmp_path: Path) -> None:
    storage, claim = files(tmp_path), Claim(tmp_path)
    claim.say(8 * SIZE)
    (tmp_path / ".claim-0123456789abcdef.900").touch()
    (tmp_path / ".unfinished-0123456789abcdef-x").write_bytes(bytes(300))
    (tmp_path / f".unfinished-{claim.token}-y").write_bytes(bytes(300))
    assert files(tmp_path).figures().used_bytes == 8 * SIZE
    assert names_in(tmp_path) == {f".claim-{claim.token}.800", f".unfinished-{claim.token}-y"}
    assert write(storage, *range(6)) == [None] * 6
    assert len(names_in(tmp_path) - {f".claim-{claim.token}.800", f".unfinished-{claim.token}-y"}) <= 2
    claim.say(10 * SIZE)
    files(tmp_path)
    (error,) = write(storage, 7)
    assert str(error) == (
        "n/7 cannot be written: it would go beyond hicache.storage.max_gib (1000 bytes) with what others are writing"
    )
    claim.close()
    assert write(storage, *range(20)) == [None] * 20
    assert len(names_in(tmp_path)) in (9, 10)


@pytest.mark.parametrize("content", [b"", b"abc", bytes(8), (1 << 40).to_bytes(8, "little"), bytes(9)])
def test_a_counter_that_is_wrong_is_put_right(tmp_path: Path, content: bytes) -> None:
    write(files(tmp_path), *range(9))
    (tmp_path / ".used").write_bytes(content)
    storage = files(tmp_path)
    assert storage.figures().used_bytes == counted(tmp_path) == 9 * SIZE


@pytest.mark.parametrize("content", [None, b"abc", (1 << 40).to_bytes(8, "little")])
def test_a_counter_that_is_lost_or_too_high_is_put_right_by_whoever_writes(
    tmp_path: Path, content: bytes | None
) -> None:
    storage = files(tmp_path)
    write(storage, *range(9))
    (tmp_path / ".used").unlink()
    if content is not None:
        (tmp_path / ".used").write_bytes(content)
    assert write(storage, 9) == [None]
    assert len(names_in(tmp_path)) == 10
    assert counted(tmp_path) == LIMIT


def test_what_is_written_while_the_folder_is_looked_through_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = files(tmp_path)
    write(storage, *range(5))
    real = space._look_through

    def look_through(folder: Path) -> object:
        found = real(folder)
        monkeypatch.undo()
        write(storage, 5, 6)
        return found

    monkeypatch.setattr(space, "_look_through", look_through)
    files(tmp_path)
    assert counted(tmp_path) == 7 * SIZE


def test_a_writer_that_finds_a_full_folder_waits_for_the_one_that_makes_room_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = files(tmp_path)
    write(storage, *range(10))
    monkeypatch.setattr(space, "_PATIENCE_S", 0.05)
    with locked(tmp_path / ".lock", 0.0):
        (error,) = write(storage, "x")
        assert str(error) == f"n/x cannot be written: {tmp_path}/.lock is locked by another process"
    monkeypatch.setattr(space, "_PATIENCE_S", 10.0)
    with locked(tmp_path / ".lock", 0.0):
        waiting = threading.Thread(target=write, args=(storage, "x"))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        (tmp_path / ".used").write_bytes(bytes(8))
    waiting.join()
    assert names_in(tmp_path) == {*map(str, range(10)), "x"}, "there was room when its turn came, so that nothing went"


def test_an_object_beyond_the_limit_is_refused_and_others_are_not(tmp_path: Path) -> None:
    storage = files(tmp_path, SIZE + 1)
    with pytest.raises(StorageError, match=r"would go beyond hicache.storage.max_gib \(101 bytes\)"):
        write_one(storage, "n/large", [memoryview(bytes(SIZE + 2))])
    assert write(storage, 1, 2) == [None, None]
    assert names_in(tmp_path) == {"2"}


def test_what_is_read_written_again_or_looked_for_to_be_written_goes_last(tmp_path: Path) -> None:
    storage = files(tmp_path)
    write(storage, *range(10))
    for number in range(10):
        age(tmp_path, str(number), 1000 - number)
    assert read_one(storage, "n/0", [memoryview(bytearray(SIZE))])
    assert write(storage, 1) == [None]
    assert storage.present({"n/2": 0, "n/none": 0}) == ["n/2"]
    assert storage.count_leading(["n/3"]) == 1
    write(storage, "new")
    assert names_in(tmp_path) == {"0", "1", "2", *map(str, range(5, 10)), "new"}


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that all may read."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody who owns nothing of it")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    os.seteuid(0)
    shutil.rmtree(folder)


def test_files_of_others_are_read_where_nothing_can_be_written(shared_folder: Path) -> None:
    write(files(shared_folder), 1)
    before = names_in(shared_folder)
    os.seteuid(65534)
    storage = files(shared_folder)
    assert read_one(storage, "n/1", [memoryview(bytearray(SIZE))]) is True
    assert storage.count_leading(["n/1", "n/2"]) == 1
    assert storage.present({"n/1": 0, "n/2": 0}) == ["n/1"]
    assert [str(error) for error in write(storage, 1, 2)] == ["None", "n/2 cannot be written: Permission denied"]
    assert names_in(shared_folder) == before


def test_a_file_system_that_is_read_only_serves_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(files(tmp_path), 1)
    real = os.open

    def open_(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, mode)

    def utime(path: Path | int, times: object) -> None:
        del times
        if isinstance(path, Path):
            path.stat()
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "utime", utime)
    storage = files(tmp_path)
    assert read_one(storage, "n/1", [memoryview(bytearray(SIZE))]) is True
    assert [str(error) for error in write(storage, 2)] == ["n/2 cannot be written: Read-only file system"]
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StorageError, match="cannot be used"):
        files(tmp_path)


def test_folders_that_were_made_for_a_file_are_on_the_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[str]()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = tmp_path / "a" / "kv"
    storage = files(folder, fsync=True)
    assert synced == [str(tmp_path), str(tmp_path / "a")]
    synced.clear()
    write(storage, "file")
    assert synced[:2] == [str(folder), str(folder / "n")]
    assert synced[3:] == [str(folder / "n" / "fi")]
    synced.clear()
    write(storage, "file2")
    assert len(synced) == 2
    write(files(folder), "other")
    assert len(synced) == 2


def test_the_end_of_a_prompt_goes_before_its_beginning(tmp_path: Path) -> None:
    """However often it is asked for, and though its pages are written, and read, from the first one on."""
    storage = files(tmp_path)
    prompt = [StorageObject(f"n/{depth:02}", [memoryview(bytearray(SIZE))], depth) for depth in range(15)]
    for _ in range(3):
        storage.present({item.name: item.depth for item in prompt})
        assert list(storage.write(prompt)) == [None] * len(prompt)
        num_leading = storage.count_leading([item.name for item in prompt])
        assert num_leading >= LIMIT // SIZE * 0.8
        assert list(storage.read(prompt[:num_leading])) == [True] * num_leading
    another = [StorageObject(f"n/a{depth}", [memoryview(bytearray(SIZE))], depth) for depth in range(4)]
    assert list(storage.write(another)) == [None] * len(another)
    assert storage.count_leading([item.name for item in another]) == len(another)
    assert 4 <= storage.count_leading([item.name for item in prompt]) < num_leading


def test_times_to_come_say_nothing(tmp_path: Path) -> None:
    """The clock was put back: what is written from now on is not given up for what was written before."""
    storage = files(tmp_path)
    write(storage, *range(10))
    for number in range(10):
        age(tmp_path, str(number), -86_400.0)
    for name in "abc":
        assert write(storage, name) == [None]
    assert storage.present(dict.fromkeys(["n/a", "n/b", "n/c"], 0)) == ["n/a", "n/b", "n/c"]
