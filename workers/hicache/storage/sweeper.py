"""Soft size limit of a folder of objects, which any number of processes may write to."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from workers.hicache.storage.folders import make_folder, try_locked

_log = logging.getLogger(__name__)

UNFINISHED = ".unfinished-"
"""Prefix of files that are being written."""
LOCK = ".lock"
_KEEP = 0.9
"""Share of the limit that a sweep leaves."""
_BETWEEN_SWEEPS = 64
"""Part of the limit that a process writes before it sweeps, so that a few writers stay below it."""
_EVERY_S = 600.0
"""Longest time between a write and a sweep."""
_RETRY_S = 1.0
"""Pause while another process sweeps."""
_ABANDONED_S = 600.0
"""Age at which an unfinished file belongs to a killed writer."""
_CLOCK_SKEW_S = 300.0
"""Largest difference between the clocks of hosts that share a folder."""

_Object = tuple[float, int, str]
"""Time of last use, size and path."""


class Sweeper:
    """Sweeper that removes the least recently used objects until the folder is below its limit.

    Each writing process has a sweeper; a lock file admits one of them at a time. Writers never wait for it, so the
    folder may exceed its limit for a short while, by what is written between two sweeps. Files that do not lie where
    objects do are neither counted nor removed.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        """Lock of the three fields below."""
        self._found_bytes = self._written_bytes = 0
        self._is_disk_full = False
        self._due, self._closed = threading.Event(), threading.Event()
        self.num_evicted = self.evicted_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Return the bytes that the last sweep left, plus those that this process has written since."""
        with self._lock:
            return self._found_bytes + self._written_bytes

    def note_written(self, num_bytes: int) -> None:
        """Count a new object; a sweep becomes due periodically."""
        with self._lock:
            self._written_bytes += num_bytes
            if self._written_bytes * _BETWEEN_SWEEPS >= self._max_bytes:
                self._due.set()

    def note_disk_full(self) -> None:
        """Make a sweep due at once that removes objects although the limit is not reached."""
        with self._lock:
            self._is_disk_full = True
            self._due.set()

    def run(self) -> None:
        """Sweep now and whenever a sweep is due, until closed."""
        self._sweep_when_free()
        while not self._closed.is_set():
            is_due = self._due.wait(_EVERY_S)
            if is_due or self._written_bytes:
                self._sweep_when_free()

    def close(self) -> None:
        """Let ``run`` return."""
        self._closed.set()
        self._due.set()

    def sweep(self) -> bool:
        """Bring the folder below its limit; False if another process is sweeping it."""
        try:
            make_folder(self._folder)
            with try_locked(self._folder / LOCK) as is_ours:
                if is_ours:
                    self._sweep()
                return is_ours
        except OSError as error:
            _log.warning("cannot sweep %s: %s", self._folder, error.strerror)
            return True

    def _sweep_when_free(self) -> None:
        """Sweep as soon as no other process does."""
        while not self._closed.is_set() and not self.sweep():
            self._closed.wait(_RETRY_S)

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
        """List all objects, and count the bytes of unfinished ones with theirs; remove those of killed writers."""
        objects, total_bytes = list[_Object](), 0
        abandoned_s = time.time() - _ABANDONED_S
        for entry in _entries(self._folder):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                stat = entry.stat(follow_symlinks=False)
                # A file's times of use can be set freely; only its change time says when it was last written.
                if entry.name.startswith(UNFINISHED) and stat.st_ctime < abandoned_s:
                    Path(entry.path).unlink()
                    continue
                total_bytes += stat.st_size
                if not entry.name.startswith("."):
                    objects.append((stat.st_mtime, stat.st_size, entry.path))
        return objects, total_bytes

    def _evict(self, objects: list[_Object], num_bytes: int) -> int:
        """Remove the least recently used objects until ``num_bytes`` are gone; return how many are.

        A time of use in the future means nothing, since the clock was set back: such objects go first.
        """
        latest_s = time.time() + _CLOCK_SKEW_S
        evicted_bytes = 0
        for _, size, path in sorted(objects, key=lambda one: (one[0] <= latest_s, one)) if num_bytes > 0 else ():
            if evicted_bytes >= num_bytes:
                break
            with contextlib.suppress(OSError):  # removed meanwhile, or not ours to remove
                Path(path).unlink()
                evicted_bytes += size
                self.num_evicted += 1
        self.evicted_bytes += evicted_bytes
        return evicted_bytes


def _entries(folder: Path) -> Iterator["os.DirEntry[str]"]:
    """Yield the regular files where objects lie: in ``namespace/aa/``, under names that begin with ``aa``."""
    for namespace in _folders(folder):
        for part in _folders(namespace):
            for entry in _scan(part):
                is_object = entry.name.startswith((part.name, UNFINISHED))
                if is_object and entry.is_file(follow_symlinks=False):
                    yield entry


def _folders(folder: Path) -> Iterator[Path]:
    return (Path(entry.path) for entry in _scan(folder) if entry.is_dir(follow_symlinks=False))


def _scan(folder: Path) -> Iterator["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except FileNotFoundError:
        return
