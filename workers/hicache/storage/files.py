"""Objects as files of one folder, which any number of processes may share, and which never has more than its limit.

A file is written under a name of its own and then renamed, so that it is there whole or not at all. Which files to give
up is told by their modification times, which reading renews, and so does being found by whoever would write them; the
deeper a file, the earlier the time that it is given, so that the end of a prompt goes before its beginning.
"""

import contextlib
import errno
import io
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from cluster.spec.errors import UserError
from cluster.spec.tiers import StorageFigures
from workers.hicache.storage.claims import Claim
from workers.hicache.storage.folders import make_folder, sync_folder
from workers.hicache.storage.interface import CorruptObjectError, Read, StorageError, StorageObject, Written
from workers.hicache.storage.space import UNFINISHED, Space

_log = logging.getLogger(__name__)

_AHEAD = 4
"""Files that the system is told of before they are read."""
_DEPTH_S = 0.1
"""By which a page of a prompt counts as used before the one above it: what storage takes for a page at most."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_BROKEN = (errno.EIO, errno.ELOOP, errno.ENXIO)
"""A file is there and cannot be read, nor will it be."""
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)


class FileStorage:
    """See the module's first lines; the methods are those of ``StorageBackend``."""

    def __init__(self, folder: Path, max_bytes: int, *, fsync: bool) -> None:
        """Make the folder; one that cannot be written to is only read.

        Raises:
            UserError: there is a file in its place.
            StorageError: it cannot be used; that may change.
        """
        self._folder = folder
        self._fsync = fsync
        self._space = Space(folder, max_bytes, fsync=fsync)
        try:
            self._space.open()
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(f"hicache.storage.folder: {folder} cannot be used ({error.strerror})") from error
        except OSError as error:
            if error.errno not in _NOT_OURS or not os.access(folder, os.R_OK | os.X_OK):
                raise StorageError(f"{folder} cannot be used: {error.strerror}") from error
            _log.warning("%s can only be read: %s", folder, error.strerror)

    def count_leading(self, names: Sequence[str]) -> int:
        """How many files are there before the first that is not."""
        return next((number for number, name in enumerate(names) if not self._has(name, Path.exists)), len(names))

    def present(self, depths: Mapping[str, int]) -> list[str]:
        """Those of these files that are there; they count as used."""
        return [name for name, depth in depths.items() if self._has(name, partial(_renew, depth=depth))]

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
        left_bytes = sum(item.num_bytes for item in objects)
        with self._space.claim() as claim:
            for item in objects:
                yield self._write(item, claim, left_bytes)
                left_bytes -= item.num_bytes

    def delete(self, name: str) -> None:
        """Remove a file."""
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{name} cannot be deleted: {error.strerror}") from error

    def figures(self) -> StorageFigures:
        """Of the folder when this process last wrote to it, or looked through it."""
        space = self._space
        return StorageFigures(
            used_bytes=space.used_bytes, num_evicted=space.num_evicted, evicted_bytes=space.evicted_bytes
        )

    def tidy(self) -> None:
        """Count what is there, and remove what writers have left that were killed."""
        try:
            self._space.count()
        except OSError as error:
            _log.warning("%s cannot be looked through: %s", self._folder, error.strerror)

    def close(self) -> None:
        """Nothing is held open."""

    def _has(self, name: str, look: Callable[[Path], bool]) -> bool:
        try:
            return look(self._path(name))
        except OSError as error:
            raise _unreadable(name, error) from error

    def _path(self, name: str) -> Path:
        """Files of one namespace are spread over folders, since very large ones are slow."""
        namespace, _, file = name.rpartition("/")
        return self._folder / namespace / file[:2] / file

    def _open(self, name: str, stack: contextlib.ExitStack) -> io.FileIO | Read:
        try:
            file = stack.enter_context(io.FileIO(self._path(name)))
        except FileNotFoundError:
            return False
        except OSError as error:
            return _failed_read(name, error)
        # A file system that cannot read ahead reads later.
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        return file

    def _write(self, item: StorageObject, claim: Claim, left_bytes: int) -> Written:
        """Write a file, then give it its name; ``left_bytes`` are its own and those of all that follow it."""
        path = self._path(item.name)
        unfinished = path.with_name(f"{UNFINISHED}{claim.token}-{path.name}")
        try:
            if _renew(path, item.depth):
                return None
            self._space.need(claim, item.num_bytes, left_bytes)
            try:
                self._fill(unfinished, item)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                unfinished.unlink(missing_ok=True)
                self._space.give_way()
                self._fill(unfinished, item)
            unfinished.rename(path)
            claim.left_bytes -= item.num_bytes
            if self._fsync:
                sync_folder(path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            return StorageError(f"{item.name} cannot be written: {error.strerror}")
        return None

    def _fill(self, path: Path, item: StorageObject) -> None:
        with self._make(path) as file:
            for part in item.parts:
                _write_all(file.fileno(), part)
            _stamp(file.fileno(), item.depth)
            if self._fsync:
                os.fsync(file.fileno())

    def _make(self, path: Path) -> BinaryIO:
        """A new file, and its folder where that is not there yet."""
        try:
            return path.open("xb", buffering=0)
        except FileNotFoundError:
            make_folder(path.parent, fsync=self._fsync)
            return path.open("xb", buffering=0)


def _read(file: io.FileIO, item: StorageObject) -> Read:
    """Fill the parts, and note that the file is in use."""
    try:
        size = os.fstat(file.fileno()).st_size
        if size != item.num_bytes or any(file.readinto(part) != len(part) for part in item.parts):
            return CorruptObjectError(f"{item.name} has {size} bytes, not {item.num_bytes}")
    except OSError as error:
        return _failed_read(item.name, error)
    # Whoever may read a file need not be allowed to say that it is in use.
    with contextlib.suppress(OSError):
        _stamp(file.fileno(), item.depth)
    return True


def _stamp(file: int | Path, depth: int) -> None:
    """Note that a file is in use, those before it in its prompt a little later: reading and writing them took less."""
    used_s = time.time() - depth * _DEPTH_S
    os.utime(file, times=(used_s, used_s))


def _renew(path: Path, depth: int) -> bool:
    """Whether a file is there, which is now among the last to go."""
    try:
        _stamp(path, depth)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise
    return True


def _failed_read(name: str, error: OSError) -> CorruptObjectError | StorageError:
    """A file that will never be read must go, or it would stand in the place of one that can be."""
    failed = _unreadable(name, error)
    return CorruptObjectError(str(failed)) if error.errno in _BROKEN else failed


def _unreadable(name: str, error: OSError) -> StorageError:
    return StorageError(f"{name} cannot be read: {error.strerror}")


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
