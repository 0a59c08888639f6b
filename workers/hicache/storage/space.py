"""What the files of a folder may still take, as agreed on by all processes that write to it, killed ones included.

Whoever writes claims room first. A counter in the folder is never less than what files have and claims say, so that the
limit holds at every moment. It is too high where a writer was killed, or files were removed, until the folder is looked
through: when there is no more room, and once by whoever has opened it.
"""

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

from workers.hicache.storage.claims import Claim, living_claims
from workers.hicache.storage.folders import locked, make_folder

UNFINISHED = ".unfinished-"
"""What the names of files begin with that are being written; the claim's token and a dash follow."""
_COUNTER = ".used"
_SWEEP = ".lock"
"""Held by the one process that looks through the folder."""
_PATIENCE_S = 10.0
_COUNTER_BYTES = 8
_UNKNOWN = 1 << 62
"""Bytes of a folder that nobody has looked through yet: there is no room before somebody has."""
_STEP = 1024
"""A claim may have this part of the limit for objects to come, so that the counter is asked less often."""
_FILL = 0.9
"""Of the limit, what is left after old files were given up."""
_AHEAD_S = 300.0
"""By which the clocks of hosts that share a folder may differ."""


class Space:
    """One process's view of it."""

    def __init__(self, folder: Path, max_bytes: int, *, fsync: bool) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._fsync = fsync
        self.used_bytes = self.num_evicted = self.evicted_bytes = 0
        """When we last looked; what we gave up."""

    def open(self) -> None:
        """Make the folder.

        Raises:
            OSError: it cannot be made, or written to.
        """
        make_folder(self._folder, fsync=self._fsync)
        with contextlib.suppress(TimeoutError), locked(self._folder / _SWEEP, 0.0):
            pass

    def count(self) -> None:
        """Count what is in the folder, unless another process is at it; a minute for a million files.

        Raises:
            OSError: it cannot be looked through.
        """
        with contextlib.suppress(TimeoutError), locked(self._folder / _SWEEP, 0.0):
            self._make_room(0)

    @contextlib.contextmanager
    def claim(self) -> Iterator[Claim]:
        """Room for a call that writes, which it asks for as it goes; what it has not used is given back."""
        claim = Claim(self._folder)
        try:
            yield claim
        finally:
            # A counter that stays too high is put right by the next count.
            with contextlib.suppress(OSError):
                self._give_back(claim)
            claim.close()

    def need(self, claim: Claim, num_bytes: int, soon_bytes: int) -> None:
        """See that a claim has room for an object; ``soon_bytes`` are its own and those of all that will follow it.

        Raises:
            OSError: there is none, although nothing is left to give up, or the folder cannot be written to.
        """
        if num_bytes <= claim.left_bytes:
            return
        more_bytes = max(num_bytes, min(soon_bytes, self._max_bytes // _STEP)) - claim.left_bytes
        if self._try_grant(claim, more_bytes):
            return
        with locked(self._folder / _SWEEP, _PATIENCE_S):
            while not self._try_grant(claim, more_bytes):
                if not self._make_room(more_bytes):
                    limit = f"hicache.storage.max_gib ({self._max_bytes} bytes)"
                    raise OSError(errno.ENOSPC, f"it would go beyond {limit} with what others are writing")

    def give_way(self) -> None:
        """The disk is full before the limit is reached: give up a part of what is there, the oldest first.

        Raises:
            OSError: the folder cannot be looked through.
        """
        with locked(self._folder / _SWEEP, _PATIENCE_S):
            self._make_room(0, is_full=True)

    def _try_grant(self, claim: Claim, num_bytes: int) -> bool:
        with self._counter() as counter:
            used_bytes = _read(counter) + num_bytes
            if used_bytes > self._max_bytes:
                # What it has written is counted as files now.
                claim.say(claim.left_bytes)
                return False
            claim.say(claim.left_bytes + num_bytes)
            _write(counter, used_bytes)
            claim.left_bytes += num_bytes
        self.used_bytes = used_bytes
        return True

    def _give_back(self, claim: Claim) -> None:
        if claim.left_bytes:
            with self._counter() as counter:
                self.used_bytes = _read(counter) - claim.left_bytes
                _write(counter, self.used_bytes)
                claim.close()

    def _make_room(self, num_bytes: int, *, is_full: bool = False) -> bool:
        """Look through the folder, and give up the files used least recently; whether so many bytes have room then.

        Where the disk ``is_full``, a part goes though there would be room by the limit. Only for the holder of the
        sweep's lock. Others go on claiming and writing meanwhile.
        """
        with self._counter() as counter:
            before = _read(counter)
            _write(counter, before)
            claimed = sum(living_claims(self._folder).values())
        files, unfinished = _look_through(self._folder)
        # A file that came meanwhile may be counted twice until the next time: too high, never too low.
        total = claimed + sum(size for _, size, _ in files)
        wanted = total + num_bytes
        is_too_much = is_full or wanted > self._max_bytes
        given_up = self._give_up(files, wanted - int(min(wanted, self._max_bytes) * _FILL) if is_too_much else 0)
        with self._counter() as counter:
            self.used_bytes = _read(counter) - before + total - given_up
            claims = living_claims(self._folder)
            for token, path in unfinished:
                if token not in claims:
                    path.unlink(missing_ok=True)
            _write(counter, self.used_bytes)
        return total - given_up + num_bytes <= self._max_bytes

    def _give_up(self, files: list[tuple[float, int, Path]], num_bytes: int) -> int:
        """Bytes of the oldest files, which are removed until they are so many.

        A time that is yet to come is of a clock that has been put back since, and says nothing: such files go first.
        """
        latest_s = time.time() + _AHEAD_S
        given_up = 0
        for _, size, path in sorted(files, key=lambda file: (file[0] <= latest_s, file)):
            if given_up >= num_bytes:
                break
            path.unlink(missing_ok=True)
            given_up += size
            self.num_evicted += 1
            self.evicted_bytes += size
        return given_up

    @contextlib.contextmanager
    def _counter(self) -> Iterator[int]:
        # Somebody may have removed the folder since.
        if not self._folder.exists():
            make_folder(self._folder, fsync=self._fsync)
        with locked(self._folder / _COUNTER, _PATIENCE_S) as counter:
            yield counter


def _read(counter: int) -> int:
    data = os.pread(counter, _COUNTER_BYTES + 1, 0)
    return int.from_bytes(data, "little", signed=True) if len(data) == _COUNTER_BYTES else _UNKNOWN


def _write(counter: int, num_bytes: int) -> None:
    os.pwrite(counter, num_bytes.to_bytes(_COUNTER_BYTES, "little", signed=True), 0)


def _look_through(folder: Path) -> tuple[list[tuple[float, int, Path]], list[tuple[str, Path]]]:
    """Time of last use, size and path of every object; token and path of those that are not finished."""
    files, unfinished = list[tuple[float, int, Path]](), list[tuple[str, Path]]()
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if name.startswith(UNFINISHED):
                unfinished.append((name.removeprefix(UNFINISHED).partition("-")[0], path))
            elif not name.startswith("."):
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    stat = path.stat()
                    files.append((stat.st_mtime, stat.st_size, path))
    return files, unfinished
