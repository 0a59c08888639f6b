"""Objects as files of one private folder, which any number of processes may share.

A file is written under a temporary name and then renamed, so that it is either complete or absent. Its modification
time is the time of last use. Reading renews it, and so does looking for the file to see whether it must be written;
the deeper an object, the earlier its time, so that the end of a prompt is evicted before its beginning.
"""

import contextlib
import errno
import io
import itertools
import logging
import os
import secrets
import stat
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cluster.spec.errors import UserError
from cluster.spec.tiers import StorageFigures
from workers.hicache.storage.folders import PRIVATE_FILE, make_folder
from workers.hicache.storage.interface import CorruptObjectError, Read, StorageError, StorageObject, Written
from workers.hicache.storage.sweeper import UNFINISHED, Sweeper

_log = logging.getLogger(__name__)

_READ_AHEAD = 4
"""Files that the kernel reads ahead."""
_DEPTH_S = 0.1
"""Age difference between a page and its predecessor in the prompt: the longest time that one page takes."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_BROKEN = (errno.EIO, errno.ELOOP, errno.ENXIO)
"""Errors of an object that will never be readable; ``ELOOP`` is a symbolic link, ``ENXIO`` a socket."""
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class FileStorage:
    """Folder as a ``StorageBackend``."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Make the folder; one that exists and cannot be written to is only read.

        Raises:
            UserError: a file is in its place.
            StorageError: the folder cannot be used at present.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self.sweeper = Sweeper(folder, max_bytes)
        try:
            make_folder(folder)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(f"hicache.storage.folder: {folder} cannot be used ({error.strerror})") from error
        except OSError as error:
            raise StorageError(f"{folder} cannot be used: {error.strerror}") from error
        if not os.access(folder, os.R_OK | os.X_OK):
            raise StorageError(f"{folder} cannot be used: {os.strerror(errno.EACCES)}")
        self._is_writable = os.access(folder, os.W_OK)
        if not self._is_writable:
            _log.warning("%s is read-only", folder)

    def count_leading(self, names: Sequence[str]) -> int:
        return next((number for number, name in enumerate(names) if not self._has(name)), len(names))

    def present(self, depths: Mapping[str, int]) -> list[str]:
        return [name for name, depth in depths.items() if self._has(name, depth)]

    def read(self, objects: Sequence[StorageObject]) -> Iterator[Read]:
        """Read files one after another, while the kernel reads ahead."""
        with contextlib.ExitStack() as stack:
            following = (self._open(item.name, stack) for item in objects)
            opened = deque(itertools.islice(following, _READ_AHEAD))
            for item in objects:
                file = opened.popleft()
                yield _read(file, item) if isinstance(file, io.FileIO) else file
                opened.extend(itertools.islice(following, 1))

    def write(self, objects: Sequence[StorageObject]) -> Iterator[Written]:
        """Write files one after another."""
        return (self._write(item) for item in objects)

    def delete(self, name: str) -> None:
        path = self._path(name)
        try:
            try:
                path.unlink(missing_ok=True)
            except IsADirectoryError:
                _move_aside(path)
        except OSError as error:
            raise StorageError(f"{name} cannot be deleted: {error.strerror}") from error

    def figures(self) -> StorageFigures:
        sweeper = self.sweeper
        return StorageFigures(
            used_bytes=sweeper.used_bytes, num_evicted=sweeper.num_evicted, evicted_bytes=sweeper.evicted_bytes
        )

    def maintain(self) -> None:
        """Keep the folder below its limit."""
        if self._is_writable:
            self.sweeper.run()

    def close(self) -> None:
        self.sweeper.close()

    def _path(self, name: str) -> Path:
        """Return an object's path: each namespace is spread over folders, since very large ones are slow."""
        namespace, _, file = name.rpartition("/")
        return self._folder / namespace / file[:2] / file

    def _has(self, name: str, depth: int | None = None) -> bool:
        """Return whether an object is there, which counts as a use if its depth is given."""
        try:
            return _is_there(self._path(name), depth)
        except OSError as error:
            raise _unreadable(name, error) from error

    def _open(self, name: str, stack: contextlib.ExitStack) -> io.FileIO | Read:
        try:
            # Neither follow a link nor wait for a writer of a pipe.
            descriptor = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if not is_regular:
                os.close(descriptor)
                return CorruptObjectError(f"{name} is not a regular file")
            file = stack.enter_context(io.FileIO(descriptor))
        except FileNotFoundError:
            return False
        except OSError as error:
            return _failed_read(name, error)
        # Some file systems cannot read ahead.
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        return file

    def _write(self, item: StorageObject) -> Written:
        path = self._path(item.name)
        unfinished = path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}-{path.name}")
        try:
            if _is_there(path, item.depth):
                return None
            if item.num_bytes > self._max_bytes:
                limit = f"hicache.storage.max_gib ({self._max_bytes} bytes)"
                return StorageError(f"{item.name} cannot be written: its {item.num_bytes} bytes exceed {limit}")
            self._fill(unfinished, item)
            _rename(unfinished, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            if error.errno in _FULL:
                self.sweeper.note_disk_full()
            return StorageError(f"{item.name} cannot be written: {error.strerror}")
        self.sweeper.note_written(item.num_bytes)
        return None

    def _fill(self, path: Path, item: StorageObject) -> None:
        descriptor = self._create(path)
        try:
            for part in item.parts:
                _write_all(descriptor, part)
            _stamp(descriptor, item.depth)
        finally:
            os.close(descriptor)

    def _create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, PRIVATE_FILE)
        except FileNotFoundError:
            make_folder(path.parent)
            return os.open(path, flags, PRIVATE_FILE)


def _read(file: io.FileIO, item: StorageObject) -> Read:
    """Fill the parts of an object and renew its file."""
    try:
        size = os.fstat(file.fileno()).st_size
        if size != item.num_bytes or any(file.readinto(part) != len(part) for part in item.parts):
            return CorruptObjectError(f"{item.name} has {size} bytes, not {item.num_bytes}")
    except OSError as error:
        return _failed_read(item.name, error)
    # A reader need not be allowed to renew the file.
    with contextlib.suppress(OSError):
        _stamp(file.fileno(), item.depth)
    return True


def _is_there(path: Path, depth: int | None) -> bool:
    """Return whether a regular file is there, and renew it if its depth is given."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        if depth is not None:
            _stamp(path, depth)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno not in _FORBIDDEN:
            raise
    return True


def _stamp(file: int | Path, depth: int) -> None:
    """Note that a file is used. Its predecessors in the prompt count as used later, though they are read before."""
    used_s = time.time() - depth * _DEPTH_S
    os.utime(file, times=(used_s, used_s))


def _rename(unfinished: Path, path: Path) -> None:
    try:
        unfinished.rename(path)
    except IsADirectoryError:
        _move_aside(path)
        unfinished.rename(path)


def _move_aside(path: Path) -> None:
    """Move aside a folder that blocks an object's path; it is not ours to remove."""
    path.rename(path.with_name(f".displaced-{secrets.token_hex(4)}-{path.name}"))


def _failed_read(name: str, error: OSError) -> CorruptObjectError | StorageError:
    """Return the error of a failed read: an object that will never be readable must make way for one that is."""
    failed = _unreadable(name, error)
    return CorruptObjectError(str(failed)) if error.errno in _BROKEN else failed


def _unreadable(name: str, error: OSError) -> StorageError:
    return StorageError(f"{name} cannot be read: {error.strerror}")


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
