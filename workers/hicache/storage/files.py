"""Storage of objects as files in a private folder that any number of processes can share.

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
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.spec.errors import UserError
from cluster.spec.tiers import StorageFigures
from workers.hicache.storage.interface import CorruptObjectError, Read, StorageError, StorageObject, Written
from workers.hicache.storage.sweeper import UNFINISHED, Sweeper

_log = logging.getLogger(__name__)

_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700
_DEPTH_S = 0.1
"""Difference between the recorded use times of consecutive pages of a prompt. Reading a page never takes longer."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FOREIGN = (errno.ELOOP, errno.ENXIO, errno.EISDIR)
"""Errors raised by opening a link, a socket or a folder at an object's path."""


class FileStorage:
    """Storage backend that keeps objects as files in a folder."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Create the folder. An existing folder may be read-only.

        Raises:
            UserError: the path is a file.
            StorageError: the folder cannot be used now.
        """
        self._folder = folder
        self.sweeper = Sweeper(folder, max_bytes)
        try:
            folder.mkdir(_PRIVATE_FOLDER, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(f"hicache.storage.folder: {folder} cannot be used ({error.strerror})") from error
        except OSError as error:
            raise StorageError(f"{folder} cannot be used: {error.strerror}") from error
        if not os.access(folder, os.R_OK | os.X_OK):
            raise StorageError(f"{folder} cannot be used: {os.strerror(errno.EACCES)}")

    def start_sweeper(self) -> None:
        """Keep the folder below its limit until ``close``, unless it is read-only."""
        if os.access(self._folder, os.W_OK):
            threading.Thread(target=self.sweeper.run, name="hicache-sweep", daemon=True).start()
        else:
            _log.warning("%s is read-only", self._folder)

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
                _move_aside(path)
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
        return self._folder / namespace / file[:2] / file

    def _is_there(self, name: str, depth: int) -> bool:
        path = self._path(name)
        try:
            is_object = stat.S_ISREG(path.lstat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise StorageError(f"{name} cannot be read: {error.strerror}") from error
        if is_object:
            _renew(path, depth)
        return is_object

    def _open(self, name: str, stack: contextlib.ExitStack) -> io.FileIO | Read:
        try:
            file = stack.enter_context(io.FileIO(self._path(name), opener=_open_object))
        except FileNotFoundError:
            return False
        except OSError as error:
            failed = f"{name} cannot be read: {error.strerror}"
            return CorruptObjectError(failed) if error.errno in _FOREIGN else StorageError(failed)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return CorruptObjectError(f"{name} is not a regular file")
        with contextlib.suppress(OSError):  # some file systems cannot read ahead
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        return file

    def _write(self, item: StorageObject) -> Written:
        path = self._path(item.name)
        unfinished = path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}-{path.name}")
        try:
            with open(unfinished, "wb", buffering=0, opener=self._create) as file:
                for part in item.parts:
                    _write_all(file.fileno(), part)
            _renew(unfinished, item.depth)
            if path.is_dir() and not path.is_symlink():
                _move_aside(path)
            unfinished.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            if error.errno in _FULL:
                self.sweeper.note_disk_full()
            return StorageError(f"{item.name} cannot be written: {error.strerror}")
        self.sweeper.note_written(item.num_bytes)
        return None

    def _create(self, path: str, flags: int) -> int:
        try:
            return os.open(path, flags, _PRIVATE_FILE)
        except FileNotFoundError:
            for folder in (self._folder, Path(path).parent):
                folder.mkdir(_PRIVATE_FOLDER, parents=True, exist_ok=True)
            return os.open(path, flags, _PRIVATE_FILE)


def _open_object(path: str, flags: int) -> int:
    """Open a file without following a link or waiting for a pipe's writer."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _move_aside(folder: Path) -> None:
    """Rename a folder that blocks an object's path. Baton did not create it and must not delete it."""
    folder.rename(folder.with_name(f".displaced-{secrets.token_hex(4)}-{folder.name}"))


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
        os.utime(file, times=(used_s, used_s))


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
