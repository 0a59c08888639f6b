"""Folder that only one account can use, and the secret key that its processes share."""

import contextlib
import errno
import logging
import os
import secrets
import stat
import tempfile
from pathlib import Path

from cluster.spec.errors import UserError
from workers.hicache.storage.interface import StorageError

_log = logging.getLogger(__name__)

KEY = ".key"
"""Name of the file with the folder's key. Sweepers lock it."""
KEY_BYTES = 32
_DISPLACED = ".displaced-"
_PRIVATE_FILE, _PRIVATE_FOLDER, _OTHERS = 0o600, 0o700, 0o077
_FOREIGN = (errno.ELOOP, errno.ENXIO, errno.EISDIR)
"""Errors raised by opening a link, a socket or a folder."""


class ForeignFileError(OSError):
    """Something at a path that is not a regular file of this account."""


class PrivateFolder:
    """Folder with mode 0700 whose files have mode 0600, whatever the umask. Hosts may share it."""

    def __init__(self, path: Path) -> None:
        """Create the folder and its key, or restrict an existing folder. A folder with a key may be read-only.

        Raises:
            UserError: the path is a file, or a folder that belongs to others too.
            StorageError: the folder cannot be used now.
        """
        self.path = path
        self.key = secrets.token_bytes(KEY_BYTES)
        """Secret of all processes that use the folder."""
        try:
            path.mkdir(_PRIVATE_FOLDER, parents=True, exist_ok=True)
            self._owner = path.stat().st_uid
            self._restrict()
            self._displace_foreign_folders()
            descriptor = self.open_key(os.O_RDONLY)
            try:
                self.key = os.read(descriptor, KEY_BYTES)
            finally:
                os.close(descriptor)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(f"hicache.storage.folder: {path} cannot be used ({error.strerror})") from error
        except OSError as error:
            raise StorageError(f"{path} cannot be used: {error.strerror}") from error

    def owns(self, info: os.stat_result) -> bool:
        """Return whether this is a regular file of the folder's account."""
        return stat.S_ISREG(info.st_mode) and info.st_uid == self._owner

    def make(self, subfolder: Path) -> None:
        """Create a subfolder, and those above it, if they are missing. Whatever is in their place is moved aside."""
        for folder in (self.path, *reversed(subfolder.relative_to(self.path).parents[:-1]), subfolder):
            path = self.path / folder
            if path != self.path:
                self._displace(path)
            path.mkdir(_PRIVATE_FOLDER, exist_ok=True)

    def open(self, path: Path, flags: int) -> int:
        """Open or create a file.

        Raises:
            ForeignFileError: there is something else at this path.
        """
        try:
            descriptor = open_at_once(path, flags)
        except OSError as error:
            if error.errno in _FOREIGN:
                raise ForeignFileError(error.errno, error.strerror) from error
            raise
        try:
            if not self.owns(os.fstat(descriptor)):
                raise ForeignFileError(errno.EPERM, "not a regular file of this account")
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def open_key(self, flags: int) -> int:
        """Open the file of the key. If there is none, create it, unless another process is faster."""
        path = self.path / KEY
        with contextlib.suppress(FileNotFoundError):
            with contextlib.suppress(ForeignFileError):
                descriptor = self.open(path, flags)
                info = os.fstat(descriptor)
                if info.st_size == KEY_BYTES and not info.st_mode & _OTHERS:
                    return descriptor
                os.close(descriptor)
            move_aside(path)
        self._put_key(path)
        return self.open(path, flags)

    def _put_key(self, path: Path) -> None:
        """Create the file of the key at once and complete, on NFS too."""
        complete = path.with_name(f"{KEY}-{secrets.token_hex(8)}")
        descriptor = self.open(complete, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            os.write(descriptor, self.key)
            os.fsync(descriptor)
            os.link(complete, path)
        except FileExistsError:
            pass  # another process was faster
        finally:
            os.close(descriptor)
            complete.unlink()

    def _displace_foreign_folders(self) -> None:
        """Move aside links and folders of others, which were put here before the folder was restricted."""
        if not os.access(self.path, os.W_OK):
            return
        for namespace in self.path.iterdir():
            if (namespace.is_symlink() or namespace.is_dir()) and not namespace.name.startswith(_DISPLACED):
                self._displace(namespace)
                for path in namespace.iterdir() if namespace.is_dir() else ():
                    if path.is_symlink() or path.is_dir():
                        self._displace(path)

    def _displace(self, path: Path) -> None:
        """Move aside whatever is at a path, unless it is a folder of this account."""
        with contextlib.suppress(FileNotFoundError):  # nothing is there, or another process was faster
            info = path.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != self._owner:
                move_aside(path)

    def _restrict(self) -> None:
        """Remove the permissions of other accounts.

        Raises:
            UserError: the folder belongs to another account, is shared like /tmp, or is on a file system without modes.
        """
        mode = stat.S_IMODE(self.path.stat().st_mode)
        if not self._is_own() or mode & stat.S_ISVTX:
            raise UserError(
                f"hicache.storage.folder: {self.path} belongs to others too (account {self._owner}, mode {mode:o}); "
                "allowed: a folder of this account, or one that does not exist yet"
            )
        if mode & 0o777 != _PRIVATE_FOLDER:
            _log.warning("%s gets mode 0700: only this account may read stored pages", self.path)
            self.path.chmod(_PRIVATE_FOLDER)
        if self.path.stat().st_mode & _OTHERS:
            raise UserError(f"hicache.storage.folder: {self.path} cannot be private: its file system ignores modes")

    def _is_own(self) -> bool:
        """Return whether the folder's files are this account's. Network file systems can map accounts."""
        if self._owner == os.geteuid():
            return True
        try:
            with tempfile.TemporaryFile(dir=self.path) as probe:
                return os.fstat(probe.fileno()).st_uid == self._owner
        except OSError:
            return False


def open_at_once(path: Path | str, flags: int) -> int:
    """Open or create a file without following a link or waiting for the other end of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, _PRIVATE_FILE)


def move_aside(path: Path) -> None:
    """Rename what blocks a path. Baton did not create it and must not delete it."""
    aside = path.with_name(f"{_DISPLACED}{secrets.token_hex(4)}-{path.name}")
    _log.warning("%s is not a file of Baton, and becomes %s", path, aside.name)
    path.rename(aside)
