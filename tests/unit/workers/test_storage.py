"""Stored pages are complete and right, or absent, after any change to the files."""

import errno
import os
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count, product
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from cluster.spec.errors import UserError
from cluster.spec.registry import AxisSizes, KvOwnership
from tests.fakes.page_stores import RankStore, page_of, read_one, records_of, sizes, write_one
from workers.hicache.policy.jobs import Breaker
from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.interface import CorruptObjectError, StorageError, StorageObject
from workers.hicache.storage.page_store import HEADER_BYTES

PAGES = [page_of(number) for number in range(7)]


def files(folder: Path, max_bytes: int = 1 << 20) -> FileStorage:
    return FileStorage(folder, max_bytes)


def objects(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_replica_keeps_one_copy_which_others_of_any_cp_and_mode_read(tmp_path: Path, tp: int, pp: int) -> None:
    backend = files(tmp_path)
    layouts = [(sizes(cp=cp, tp=tp, pp=pp), ownership) for cp, ownership in product((1, 2, 3), KvOwnership)]
    for of, ownership in layouts:
        for record in records_of(of, ownership):
            assert all(RankStore(backend, record).write(PAGES))
    pages_bytes = sum(path.stat().st_size - HEADER_BYTES for path in objects(tmp_path))
    assert pages_bytes == len(PAGES) * records_of(sizes())[0].layout.page_bytes
    for of, ownership in layouts:
        for record in records_of(of, ownership):
            reader = RankStore(backend, record)
            assert reader.look_up(PAGES) == reader.read(PAGES) == [True] * len(PAGES)


def put_link(path: Path) -> None:
    path.symlink_to(path.parent / "target")


def put_folder(path: Path) -> None:
    path.mkdir()
    (path / "file").touch()


def put_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def put_second_name(path: Path) -> None:
    path.hardlink_to(path.parent / "target")


def put_file_of_another_account(path: Path) -> None:
    shutil.copy(path.parent / "target", path)
    try:
        os.chown(path, 12345, -1)
    except PermissionError:
        pytest.skip("only root can give a file away")


TOO_LONG = "b" * 300
"""Name of an object that no file system can store."""


def put_link_to_a_folder(path: Path) -> None:
    outside = next(parent / "outside" for parent in path.parents if (parent / "outside").is_dir())
    path.symlink_to(outside, target_is_directory=True)


def put_file(path: Path) -> None:
    path.write_text("junk")


def put_folder_of_another_account(path: Path) -> None:
    path.mkdir()
    try:
        os.chown(path, 12345, -1)
    except PermissionError:
        pytest.skip("only root can give a folder away")


FOREIGN = [put_link, os.mkfifo, put_folder, put_socket, put_file_of_another_account]


@pytest.mark.parametrize("put", [*FOREIGN, put_second_name])
@pytest.mark.parametrize("is_read_first", [True, False])
def test_invalid_files_are_replaced_by_objects(
    tmp_path: Path, put: Callable[[Path], None], *, is_read_first: bool
) -> None:
    store = RankStore(files(tmp_path), records_of(sizes())[0])
    assert store.write(PAGES[:2]) == [True, True]
    path, _ = sorted(objects(tmp_path))
    target = path.parent / "target"
    target.write_bytes(path.read_bytes())
    os.utime(target, (5, 5))
    path.unlink()
    put(path)
    if is_read_first:
        assert sorted(store.read(PAGES[:2])) == [False, True]
        assert store.failures["corrupt"] == 1
    assert sorted(store.look_up(PAGES[:2])) in ([False, False], [False, True])
    assert store.write(PAGES[:2]) == store.read(PAGES[:2]) == [True, True]
    assert (path.lstat().st_mode, path.lstat().st_nlink, path.lstat().st_uid) == (0o100600, 1, os.geteuid())
    assert (target.stat().st_mtime, target.read_bytes()) == (5.0, path.read_bytes())
    assert len(list(path.parent.glob(".displaced-*/file"))) == (put is put_folder)


@pytest.mark.parametrize("put", [put_link_to_a_folder, put_file, put_folder_of_another_account])
@pytest.mark.parametrize("depth", [1, 2])
def test_whatever_is_in_the_place_of_a_subfolder_is_moved_aside(
    tmp_path: Path, put: Callable[[Path], None], depth: int
) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "store"
    outside.mkdir()
    store = RankStore(files(folder), records_of(sizes())[0])
    assert store.write(PAGES[:1]) == [True]
    (path,) = objects(folder)
    place = path.parents[2 - depth]
    shutil.rmtree(place)
    put(place)
    store = RankStore(files(folder), records_of(sizes())[0])
    assert store.look_up(PAGES[:1]) == [False]
    assert store.write(PAGES[:1]) == store.read(PAGES[:1]) == [True]
    assert place.lstat().st_mode == 0o40700
    assert list(outside.iterdir()) == []
    assert len(list(place.parent.glob(".displaced-*"))) == 1
    files(folder)
    assert len(list(place.parent.glob(".displaced-*"))) == 1


@pytest.mark.parametrize("of", [sizes(tp=2), sizes(pp=2), sizes(tp=4, pp=2)])
def test_replicas_that_divide_heads_or_layers_otherwise_find_nothing(tmp_path: Path, of: AxisSizes) -> None:
    backend = files(tmp_path)
    RankStore(backend, records_of(sizes())[0]).write(PAGES)
    for record in records_of(of):
        reader = RankStore(backend, record)
        assert reader.look_up(PAGES) == reader.read(PAGES) == [False] * len(PAGES)


def test_other_weights_and_other_keys_find_nothing(tmp_path: Path) -> None:
    backend, (record,) = files(tmp_path), records_of(sizes())
    RankStore(backend, record).write(PAGES[:3])
    assert RankStore(backend, record, weights="other").look_up(PAGES) == [False] * 7
    assert RankStore(backend, record).look_up(PAGES) == [True] * 3 + [False] * 4
    assert RankStore(backend, record).read(PAGES) == [True] * 3 + [False] * 4


def test_no_byte_of_an_object_may_change(tmp_path: Path) -> None:
    store = RankStore(files(tmp_path), records_of(sizes())[0])
    store.write(PAGES[:1])
    (path,) = objects(tmp_path)
    whole = path.read_bytes()
    for offset in range(len(whole)):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1 << offset % 8]) + whole[offset + 1 :])
        assert store.read(PAGES[:1]) == [False]
        assert not path.exists()
    for wrong in (whole[:-1], whole + b"\0", whole[:HEADER_BYTES], b""):
        path.write_bytes(wrong)
        assert store.read(PAGES[:1]) == [False]
    assert store.failures["corrupt"] == len(whole) + 4
    path.write_bytes(whole)
    assert store.read(PAGES[:1]) == [True]


def test_an_object_under_the_name_of_another_is_refused(tmp_path: Path) -> None:
    store = RankStore(files(tmp_path), records_of(sizes())[0])
    store.write(PAGES[:1])
    (mine,) = objects(tmp_path)
    store.write(PAGES[1:2])
    (other,) = [path for path in objects(tmp_path) if path != mine]
    other.write_bytes(mine.read_bytes())
    assert store.read(PAGES[:2]) == [True, False]


def test_two_backends_on_one_folder_write_the_same_object(tmp_path: Path) -> None:
    one, other = files(tmp_path), files(tmp_path)
    write_one(one, "n/a", [memoryview(b"abc"), memoryview(b"d")])
    write_one(other, "n/a", [memoryview(b"abcd")])
    buffer = memoryview(bytearray(4))
    assert read_one(other, "n/a", [buffer])
    assert bytes(buffer) == b"abcd"
    one.delete("n/a")
    one.delete("n/a")
    assert not read_one(other, "n/a", [buffer])
    assert other.present({"n/a": 0}) == []


def test_one_call_returns_the_result_of_each_object(tmp_path: Path) -> None:
    backend = files(tmp_path)
    given = {f"n/{name}": memoryview(bytearray(name[:2].encode())) for name in ("aa", TOO_LONG, "cc", "dd")}
    written = backend.write([StorageObject(name, [data]) for name, data in given.items()])
    assert [type(error) for error in written] == [type(None), StorageError, type(None), type(None)]
    (tmp_path / "n" / "cc" / "cc").write_bytes(b"c")
    taken = {name: memoryview(bytearray(2)) for name in (*given, "n/ee", "n/ff", "n/aa")}
    read = backend.read([StorageObject(name, [data[:1], data[1:]]) for name, data in taken.items()])
    assert [outcome if isinstance(outcome, bool) else type(outcome) for outcome in read] == [
        *(True, StorageError, CorruptObjectError),
        *(True, False, False),
    ]
    assert (bytes(taken["n/aa"]), bytes(taken["n/dd"])) == (b"aa", b"dd")


def test_disk_errors_are_storage_errors(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be used"):
        FileStorage(tmp_path / "file" / "folder", 1)
    backend = FileStorage(tmp_path / "kv", 1 << 20)
    write_one(backend, "n/aa", [memoryview(b"1")])
    with pytest.raises(CorruptObjectError, match="has 1 bytes, expected 2"):
        read_one(backend, "n/aa", [memoryview(bytearray(2))])
    with pytest.raises(StorageError, match="cannot be written: File name too long"):
        write_one(backend, f"n/{TOO_LONG}", [memoryview(b"1")])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_file_lost_while_open_fails_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """A network file system can fail any look at an open file."""
    store, real, num_looks = RankStore(files(tmp_path), records_of(sizes())[0]), os.fstat, count()
    store.write(PAGES)
    num_open = len(list(Path("/proc/self/fd").iterdir()))

    def fstat(descriptor: int) -> os.stat_result:
        if next(num_looks) == failing:
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(descriptor)

    monkeypatch.setattr(os, "fstat", fstat)
    assert store.read(PAGES) == [False] + [True] * (len(PAGES) - 1)
    assert store.failures == {"error": 1}
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open


def test_a_full_disk_fails_writes_until_a_sweep_frees_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = files(tmp_path)
    store = RankStore(backend, records_of(sizes())[0])
    store.write(PAGES[:1])
    (path,) = objects(tmp_path)
    num_bytes, real = path.stat().st_size, os.write

    def write(descriptor: int, data: memoryview) -> int:
        used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        free = num_bytes * 7 // 2 - used
        if free <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:free])

    monkeypatch.setattr(os, "write", write)
    deep = [msgspec.structs.replace(page, depth=depth) for depth, page in enumerate(PAGES[:4])]
    assert store.write(deep) == [True, True, True, False]
    assert store.failures["error"] == 1
    assert not list(tmp_path.rglob(".unfinished-*"))
    backend.sweeper.sweep()
    assert store.write(deep[3:]) == [True]
    assert store.read(deep) == [True, True, False, True]


@pytest.mark.parametrize("is_new", [True, False])
def test_files_and_folders_are_private(tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_new: bool) -> None:
    folder = tmp_path / "a" / "kv"
    umask = os.umask(0)
    try:
        if not is_new:
            folder.mkdir(parents=True)
        backend = files(folder)
        write_one(backend, "n/aa", [memoryview(b"1")])
        backend.sweeper.sweep()
    finally:
        os.umask(umask)
    assert ("gets mode 0700" in caplog.text) is not is_new
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*")) if path.is_dir()}
    assert modes == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()} == {0o600}


def test_a_folder_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(UserError, match=r"belongs to others too \(account \d+, mode 1777\); allowed: a folder of this"):
        files(tmp_path)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with monkeypatch.context() as denied:
        denied.setattr("tempfile.TemporaryFile", lambda **_: os.open(tmp_path / "none", os.O_RDONLY))
        with pytest.raises(UserError, match="belongs to others too"):
            files(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    with monkeypatch.context() as ignored:
        ignored.setattr(Path, "chmod", lambda *_: None)
        with pytest.raises(UserError, match="cannot be private: its file system ignores modes"):
            files(tmp_path)
    # Files that this process creates belong to the folder's account, as on NFS that maps accounts.
    write_one(files(tmp_path), "n/aa", [memoryview(b"1")])
    assert files(tmp_path).present({"n/aa": 0}) == ["n/aa"]


def test_names_and_contents_depend_on_the_folders_key(tmp_path: Path) -> None:
    folders, page = [tmp_path / "one", tmp_path / "other"], PAGES[0]
    for folder in folders:
        assert RankStore(files(folder), records_of(sizes())[0]).write([page]) == [True]
    (mine,), (forged,) = map(objects, folders)
    assert mine.name != forged.name
    assert page.key.hex() not in f"{mine}{forged}"
    right, zeros = mine.read_bytes(), bytes(mine.stat().st_size - HEADER_BYTES)
    name = f"{mine.parent.parent.name}/{mine.name}\0".encode()
    store = RankStore(files(folders[0]), records_of(sizes())[0])
    for content in (forged.read_bytes(), blake3(name + zeros, key=bytes(32)).digest() + zeros):
        mine.write_bytes(content)
        assert store.look_up([page]) == [True]
        assert store.read([page]) == [False]
        assert not mine.exists()
    assert store.failures["corrupt"] == 2
    assert store.write([page]) == store.read([page]) == [True]
    assert mine.read_bytes() == right


def put_short_key(path: Path) -> None:
    path.write_bytes(b"short")
    path.chmod(0o600)


def put_readable_key(path: Path) -> None:
    path.write_bytes(b"k" * 32)
    path.chmod(0o644)


@pytest.mark.parametrize("put", [None, put_short_key, put_readable_key, *FOREIGN])
def test_processes_agree_on_a_key(tmp_path: Path, put: Callable[[Path], None] | None) -> None:
    target, key = tmp_path / "target", tmp_path / ".key"
    target.write_bytes(b"t" * 32)
    if put is None:
        with ThreadPoolExecutor(8) as threads:
            keys = {storage.key for storage in threads.map(files, [tmp_path] * 32)}
    else:
        put(key)
        keys = {files(tmp_path).key for _ in range(2)}
    assert (keys, len(key.read_bytes())) == ({key.read_bytes()}, 32)
    assert (target.read_bytes(), key.stat().st_uid) == (b"t" * 32, os.geteuid())
    assert {path.name for path in tmp_path.iterdir() if "displaced" not in path.name} == {"target", ".key"}


def test_a_folder_that_is_read_only_serves_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_one(files(tmp_path), "n/1", [memoryview(b"1")])
    real = os.open

    def open_(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, mode)

    def utime(path: object, times: object, **_: object) -> None:
        raise OSError(errno.EROFS, f"{path} is not set to {times}")

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "utime", utime)
    monkeypatch.setattr(os, "access", lambda _path, mode: not mode & os.W_OK)
    backend = files(tmp_path)
    backend.start_sweeper()
    assert "is read-only" in caplog.text
    assert backend.present({"n/1": 0, "n/2": 0}) == ["n/1"]
    assert read_one(backend, "n/1", [memoryview(bytearray(1))]) is True
    with pytest.raises(StorageError, match="n/2 cannot be written: Read-only file system"):
        write_one(backend, "n/2", [memoryview(b"2")])
    (tmp_path / ".key").unlink()
    with pytest.raises(StorageError, match="cannot be used: Read-only file system"):
        files(tmp_path)


def test_a_breaker_opens_after_failures_in_a_row_and_longer_each_time() -> None:
    breaker = Breaker()
    for _ in range(2):
        breaker.note(0.0, is_success=False)
    breaker.note(0.0, is_success=True)
    for _ in range(2):
        breaker.note(0.0, is_success=False)
    assert not breaker.is_open(0.0)
    breaker.note(0.0, is_success=False)
    assert (breaker.is_open(0.9), breaker.is_open(1.0)) == (True, False)
    breaker.note(1.0, is_success=False)
    assert (breaker.is_open(2.9), breaker.is_open(3.0)) == (True, False)
    for _ in range(20):
        breaker.note(100.0, is_success=False)
    breaker.note(3.0, is_success=True)
    assert not breaker.is_open(3.0)
