"""Storage of objects as files in a private folder that any number of processes of one account can share.

A file is written under a temporary name and then renamed, so it is either complete or absent. Its modification time
records its last use. Reads and look-ups update it. Deeper pages of a prompt get earlier times, so that the end of a
prompt is evicted before its beginning.
"""

import contextlib
import errno
import io
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.spec.tiers import StorageFigures
from workers.hicache.storage.interface import CorruptObjectError, Read, StorageError, StorageObject, Written
from workers.hicache.storage.private_folder import ForeignFileError, PrivateFolder, move_aside
from workers.hicache.storage.sweeper import UNFINISHED, Sweeper

_log = logging.getLogger(__name__)

_DEPTH_S = 0.1
"""Difference between the recorded use times of consecutive pages of a prompt. Reading a page never takes longer."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class FileStorage:
    """Storage backend that keeps objects as files in a folder."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Open the folder. An existing folder may be read-only.

        Raises:
            UserError: the folder cannot be private.
            StorageError: the folder cannot be used now.
        """
        self._folder = PrivateFolder(folder)
        self.key = self._folder.key
        self.sweeper = Sweeper(self._folder, max_bytes)

    def start_sweeper(self) -> None:
        """Keep the folder below its limit until ``close``, unless it is read-only."""
        if os.access(self._folder.path, os.W_OK):
            threading.Thread(target=self.sweeper.run, name="hicache-sweep", daemon=True).start()
        else:
            _log.warning("%s is read-only", self._folder.path)

    def present(self, depths: Mapping[str, int]) -> list[str]:
        return [name for name, depth in depths.items() if self._is_there(name, depth)]

    def read(self, objects: Sequence[StorageObject]) -> list[Read]:
        """Read files one after another while the kernel reads ahead."""
        with contextlib.ExitStack() as stack:
            files = [self._open(item.name, stack) for item in objects]
            return [
                _read(file, item) if isinstance(file, io.FileIO) else file
                for file, item in zip(files, objects, strict=True)
            ]

    def write(self, objects: Sequence[StorageObject]) -> list[Written]:
        return [self._write(item) for item in objects]

    def delete(self, name: str) -> None:
        path = self._path(name)
        try:
            if path.is_dir() and not path.is_symlink():
                move_aside(path)
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{name} cannot be deleted: {error.strerror}") from error

    def figures(self) -> StorageFigures:
        sweeper = self.sweeper
        return StorageFigures(
            used_bytes=sweeper.used_bytes, num_evicted=sweeper.num_evicted, evicted_bytes=sweeper.evicted_bytes
        )

    def close(self) -> None:
        self.sweeper.close()

    def _path(self, name: str) -> Path:
        """Return an object's path. A namespace has subfolders, since very large folders are slow."""
        namespace, _, file = name.rpartition("/")
        return self._folder.path / namespace / file[:2] / file

    def _is_there(self, name: str, depth: int) -> bool:
        path = self._path(name)
        try:
            is_object = self._is_object(path.lstat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise StorageError(f"{name} cannot be read: {error.strerror}") from error
        if is_object:
            _renew(path, depth)
        return is_object

    def _is_object(self, info: os.stat_result) -> bool:
        return self._folder.owns(info) and info.st_nlink == 1

    def _open(self, name: str, stack: contextlib.ExitStack) -> io.FileIO | Read:
        try:
            file = stack.enter_context(io.FileIO(self._folder.open(self._path(name), os.O_RDONLY)))
            is_object = self._is_object(os.fstat(file.fileno()))
        except FileNotFoundError:
            return False
        except ForeignFileError as error:
            return CorruptObjectError(f"{name} is not an object: {error.strerror}")
        except OSError as error:
            return StorageError(f"{name} cannot be read: {error.strerror}")
        if not is_object:
            return CorruptObjectError(f"{name} is not an object: it has another name too")
        with contextlib.suppress(OSError):  # some file systems cannot read ahead
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        return file

    def _write(self, item: StorageObject) -> Written:
        path = self._path(item.name)
        unfinished = path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}-{path.name}")
        try:
            with io.FileIO(self._create(unfinished), "wb") as file:
                for part in item.parts:
                    _write_all(file.fileno(), part)
            _renew(unfinished, item.depth)
            if path.is_dir() and not path.is_symlink():
                move_aside(path)
            unfinished.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            if error.errno in _FULL:
                self.sweeper.note_disk_full()
            return StorageError(f"{item.name} cannot be written: {error.strerror}")
        self.sweeper.note_written(item.num_bytes)
        return None

    def _create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return self._folder.open(path, flags)
        except (FileNotFoundError, NotADirectoryError):
            self._folder.make(path.parent)
            return self._folder.open(path, flags)


def _read(file: io.FileIO, item: StorageObject) -> Read:
    """Read an object into its parts, and mark its file as used."""
    try:
        size = os.fstat(file.fileno()).st_size
        if size != item.num_bytes or any(file.readinto(part) != len(part) for part in item.parts):
            return CorruptObjectError(f"{item.name} has {size} bytes, expected {item.num_bytes}")
    except OSError as error:
        return StorageError(f"{item.name} cannot be read: {error.strerror}")
    _renew(file.fileno(), item.depth)
    return True


def _renew(file: int | Path, depth: int) -> None:
    """Update a file's time of last use. Earlier pages of a prompt get later times, although they are read first."""
    used_s = time.time() - depth * _DEPTH_S
    with contextlib.suppress(OSError):  # readers may lack permission
        os.utime(file, times=(used_s, used_s), follow_symlinks=isinstance(file, int))


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
