"""Objects as files of one folder, which any number of processes may share.

A file is written under a name of its own and then renamed, so that it is there whole or not at all. Which files to give
up is told by their modification times, which reading renews.
"""

import contextlib
import fcntl
import io
import itertools
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster.spec.errors import UserError
from cluster.spec.tiers import StorageFigures
from workers.hicache.storage.interface import CorruptObjectError, Read, StorageError, StorageObject, Written

_UNFINISHED = ".unfinished-"
_UNFINISHED_S = 3600.0
"""Age at which nobody writes to an unfinished file any more."""
_LOCK = ".lock"
_AHEAD = 4
"""Files that the system is told of before they are read."""
_SLACK = 16
"""A folder is looked through when a process has written a part of its size; it may exceed its limit by one for each."""
_FILL = 0.9
"""Of the limit, what is left after old files were given up."""


class FileStorage:
    """See the module's first lines; the methods are those of ``StorageBackend``."""

    def __init__(self, folder: Path, max_bytes: int, *, fsync: bool) -> None:
        """Make the folder.

        Raises:
            UserError: there is a file in its place.
            StorageError: it cannot be made, or written to; that may change.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._fsync = fsync
        self._me = secrets.token_hex(8)
        """In the names of unfinished files: processes of several hosts may share the folder."""
        self._numbers = itertools.count()
        self._unseen_bytes = 0
        """Written by this process since it last looked through the folder."""
        self._used_bytes = self._num_evicted = self._evicted_bytes = 0
        try:
            self._make_room()
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(f"hicache.storage.folder: {folder} cannot be used ({error.strerror})") from error
        except OSError as error:
            raise StorageError(f"{folder} cannot be used: {error.strerror}") from error

    def count_leading(self, names: Sequence[str]) -> int:
        """How many files are there before the first that is not."""
        return next((number for number, name in enumerate(names) if not self._has(name)), len(names))

    def present(self, names: Sequence[str]) -> list[str]:
        """Those of these files that are there."""
        return [name for name in names if self._has(name)]

    def read(self, objects: Sequence[StorageObject]) -> Iterator[Read]:
        """Read files one after another, while the system reads ahead in those that follow."""
        with contextlib.ExitStack() as stack:
            coming = (self._open(item.name, stack) for item in objects)
            opened = deque(itertools.islice(coming, _AHEAD))
            for item in objects:
                file = opened.popleft()
                yield _read(file, item) if isinstance(file, io.FileIO) else file
                opened.extend(itertools.islice(coming, 1))

    def write(self, objects: Sequence[StorageObject]) -> Iterator[Written]:
        """Write files one after another."""
        for item in objects:
            yield self._write(item)

    def delete(self, name: str) -> None:
        """Remove a file."""
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{name} cannot be deleted: {error.strerror}") from error

    def figures(self) -> StorageFigures:
        """Of the folder when it was last looked through, and what was done since."""
        return StorageFigures(
            used_bytes=self._used_bytes, num_evicted=self._num_evicted, evicted_bytes=self._evicted_bytes
        )

    def close(self) -> None:
        """Nothing is held open."""

    def _has(self, name: str) -> bool:
        try:
            return self._path(name).exists()
        except OSError as error:
            raise _unreadable(name, error) from error

    def _path(self, name: str) -> Path:
        """Files of one namespace are spread over folders, since very large ones are slow."""
        namespace, _, file = name.rpartition("/")
        return self._folder / namespace / file[:2] / file

    def _open(self, name: str, stack: contextlib.ExitStack) -> io.FileIO | bool | StorageError:
        try:
            file = stack.enter_context(io.FileIO(self._path(name)))
        except FileNotFoundError:
            return False
        except OSError as error:
            return _unreadable(name, error)
        # A file system that cannot read ahead reads later.
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        return file

    def _write(self, item: StorageObject) -> Written:
        """Write a file, then give it its name."""
        path = self._path(item.name)
        unfinished = path.with_name(f"{_UNFINISHED}{self._me}-{next(self._numbers)}")
        try:
            if path.exists():
                return None
            path.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("xb", buffering=0) as file:
                for part in item.parts:
                    _write_all(file.fileno(), part)
                if self._fsync:
                    os.fsync(file.fileno())
            unfinished.rename(path)
            if self._fsync:
                _fsync_folder(path.parent)
            self._note_written(item.num_bytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            return StorageError(f"{item.name} cannot be written: {error.strerror}")
        return None

    def _note_written(self, num_bytes: int) -> None:
        self._unseen_bytes += num_bytes
        self._used_bytes += num_bytes
        if self._unseen_bytes > self._max_bytes // _SLACK:
            self._make_room()

    def _make_room(self) -> None:
        """Look through the folder, and give up the files that were used least recently while it is too large."""
        self._unseen_bytes = 0
        # Somebody may have removed the folder since.
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / _LOCK).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # another process is at it
            files = sorted(_files(self._folder))
            total = sum(size for _, size, _ in files)
            limit = self._max_bytes if total <= self._max_bytes else int(self._max_bytes * _FILL)
            for _, size, path in files:
                if total <= limit:
                    break
                path.unlink(missing_ok=True)
                total -= size
                self._num_evicted += 1
                self._evicted_bytes += size
            self._used_bytes = total


def _read(file: io.FileIO, item: StorageObject) -> Read:
    """Fill the parts, and note that the file is in use."""
    try:
        size = os.fstat(file.fileno()).st_size
        if size != item.num_bytes or any(file.readinto(part) != len(part) for part in item.parts):
            return CorruptObjectError(f"{item.name} has {size} bytes, not {item.num_bytes}")
        os.utime(file.fileno())
    except OSError as error:
        return _unreadable(item.name, error)
    return True


def _unreadable(name: str, error: OSError) -> StorageError:
    return StorageError(f"{name} cannot be read: {error.strerror}")


def _files(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Time of last use, size and path of every object; removes what killed processes have left unfinished."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue  # another process was faster
            if not name.startswith("."):
                yield stat.st_mtime, stat.st_size, path
            elif name.startswith(_UNFINISHED) and stat.st_mtime < time.time() - _UNFINISHED_S:
                path.unlink(missing_ok=True)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
