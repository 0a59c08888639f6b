"""Soft size limit for a folder of objects that any number of processes may write to."""

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from workers.hicache.storage.private_folder import PrivateFolder

_log = logging.getLogger(__name__)

UNFINISHED = ".unfinished-"
"""Prefix of files that are being written."""
_KEEP = 0.9
"""Fraction of the limit that a sweep leaves in use."""
_BETWEEN_SWEEPS = 64
"""Number of sweeps that a process makes while it writes as many bytes as the size limit."""
_EVERY_S = 600.0
"""Maximum time between two sweeps."""
_ABANDONED_S = 600.0
"""Age at which an unfinished file is assumed to belong to a killed writer."""

_Object = tuple[float, int, Path]
"""Time of last use, size and path."""


class Sweeper:
    """Sweeper that removes the least recently used objects until the folder is below its limit.

    Each writing process has a sweeper. A lock ensures that only one sweeps at a time. Writers never wait for it,
    so the folder may briefly exceed its limit. Other files in the folder are neither counted nor removed.
    """

    def __init__(self, folder: PrivateFolder, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        """Lock that guards the three fields below."""
        self._found_bytes = self._written_bytes = 0
        self._is_disk_full = False
        self._due, self._closed = threading.Event(), threading.Event()
        self.num_evicted = self.evicted_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Return the bytes in use after the last sweep, plus the bytes that this process has written since."""
        with self._lock:
            return self._found_bytes + self._written_bytes

    def note_written(self, num_bytes: int) -> None:
        """Count a new object, and request a sweep if enough has been written."""
        with self._lock:
            self._written_bytes += num_bytes
            if self._written_bytes * _BETWEEN_SWEEPS >= self._max_bytes:
                self._due.set()

    def note_disk_full(self) -> None:
        """Request a sweep that removes objects even if the folder is below its limit."""
        with self._lock:
            self._is_disk_full = True
            self._due.set()

    def run(self) -> None:
        """Sweep now and whenever a sweep is due, until closed."""
        while True:
            self.sweep()
            if self._closed.is_set():
                return
            self._due.wait(_EVERY_S)

    def close(self) -> None:
        self._closed.set()
        self._due.set()

    def sweep(self) -> None:
        """Remove objects until the folder is below its limit. Wait while another process sweeps."""
        try:
            lock = self._folder.open_key(os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._sweep()
            finally:
                os.close(lock)
        except OSError as error:
            _log.warning("cannot sweep %s: %s", self._folder.path, error.strerror)

    def _sweep(self) -> None:
        self._due.clear()
        with self._lock:
            written_bytes, is_disk_full = self._written_bytes, self._is_disk_full
            self._is_disk_full = False
        objects, total_bytes = self._list()
        limit_bytes = min(total_bytes, self._max_bytes) if is_disk_full else self._max_bytes
        total_bytes -= self._evict(objects, total_bytes - int(limit_bytes * _KEEP))
        with self._lock:
            self._found_bytes = total_bytes
            self._written_bytes -= written_bytes

    def _list(self) -> tuple[list[_Object], int]:
        """List all objects, and sum their bytes and the bytes of unfinished files. Remove files of killed writers.

        A file larger than the limit is no object. It is removed first, since its size would evict all others.
        """
        objects, total_bytes = list[_Object](), 0
        abandoned_s = time.time() - _ABANDONED_S
        for entry in self._files():
            with contextlib.suppress(OSError):  # removed in the meantime
                path, info = Path(entry.path), entry.stat(follow_symlinks=False)
                if not self._folder.owns(info):
                    continue
                is_excessive, is_unfinished = info.st_size > self._max_bytes, entry.name.startswith(UNFINISHED)
                # The modification time is the time of use. Only the change time shows when a file was last written.
                if is_unfinished and (is_excessive or info.st_ctime < abandoned_s):
                    path.unlink()
                    continue
                total_bytes += info.st_size
                if not is_unfinished:
                    objects.append((0.0 if is_excessive else info.st_mtime, info.st_size, path))
        return objects, total_bytes

    def _files(self) -> Iterator[os.DirEntry[str]]:
        """Yield objects and unfinished files. Objects are in ``namespace/aa/`` under names that start with ``aa``."""
        for namespace in _subfolders(self._folder.path):
            for folder in _subfolders(namespace.path):
                names = (folder.name, UNFINISHED)
                yield from (entry for entry in _entries(folder.path) if entry.name.startswith(names))

    def _evict(self, objects: list[_Object], num_bytes: int) -> int:
        """Remove the least recently used objects until ``num_bytes`` are freed; return the bytes freed."""
        evicted_bytes = 0
        for _, size, path in sorted(objects):
            if evicted_bytes >= num_bytes:
                break
            with contextlib.suppress(OSError):  # removed in the meantime, or owned by another user
                path.unlink()
                evicted_bytes += size
                self.num_evicted += 1
        self.evicted_bytes += evicted_bytes
        return evicted_bytes


def _subfolders(folder: Path | str) -> list[os.DirEntry[str]]:
    return [entry for entry in _entries(folder) if entry.is_dir(follow_symlinks=False)]


def _entries(folder: Path | str) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; none if it was removed in the meantime, or is not readable."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return list(entries)
    return []
