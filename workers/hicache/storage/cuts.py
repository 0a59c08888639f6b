"""Which cuts there are stored pages of: every writer leaves a mark under a number that is free, and readers read all.

So nobody has to list what is stored, nor to guess at cuts.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from workers.hicache.storage.interface import CorruptObjectError, StorageBackend, StorageError, StorageObject, write_one
from workers.hicache.storage.objects import MARK_BYTES, Cut, Naming

_log = logging.getLogger(__name__)

NUM_MARKS = 64
"""Cuts of one model that storage tells of; pages of any more are read by replicas of the same cut alone."""
_LOOK_AGAIN_S = 10.0


class KnownCuts:
    """The cuts that one rank can read, its own first."""

    def __init__(
        self, backend: StorageBackend, naming: Naming, own: Cut, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend = backend
        self._naming = naming
        self._now_s = now_s
        self._names = [naming.mark(number) for number in range(NUM_MARKS)]
        self._looking = threading.Lock()
        """One thread reads and another writes; neither waits for the other's look."""
        self._looked_s: float | None = None
        self._marked_s: float | None = None
        self._refused: set[bytes] = set()
        self._own_mark: str | None = None
        """Where it was left."""
        self.cuts = [own]

    def mark(self) -> None:
        """Leave word of our own pages, and see now and then that it is still there.

        Raises:
            StorageError: it cannot be written.
        """
        now_s = self._now_s()
        if self._marked_s is not None and now_s < self._marked_s + _LOOK_AGAIN_S:
            return
        if self._own_mark is None or not self._is_own(self._own_mark):
            self._own_mark = self._leave_mark()
        self._marked_s = now_s

    def look(self) -> int:
        """Look for other cuts, unless that was done a moment ago; how many more there are that cannot be read.

        Raises:
            StorageError: storage cannot tell.
        """
        if not self._looking.acquire(blocking=False):
            return 0
        try:
            now_s = self._now_s()
            if self._looked_s is not None and now_s < self._looked_s + _LOOK_AGAIN_S:
                return 0
            self._looked_s = now_s
            names = self._backend.present(self._names)
            marks = self._read(names) if names else []
            return self._take_in([mark for mark in marks if mark is not None])
        finally:
            self._looking.release()

    def _leave_mark(self) -> str | None:
        """Where it is: of several who write to one name at once, only one is read there, and the others go on."""
        taken = set(self._backend.present(self._names))
        for name in self._names:
            if name not in taken:
                write_one(self._backend, name, [memoryview(self._naming.mark_of(self.cuts[0]))])
            if self._is_own(name):
                return name
        _log.warning("there are marks of %d other cuts: replicas of those do not find these pages", NUM_MARKS)
        return None

    def _is_own(self, name: str) -> bool:
        return self._read([name]) == [self._naming.mark_of(self.cuts[0])]

    def _take_in(self, marks: Sequence[bytes]) -> int:
        found = {mark: self._naming.cut_of(mark) for mark in marks}
        refused = {mark for mark, cut in found.items() if cut is None} - self._refused
        for mark in refused:
            _log.warning("pages of %r cannot be read", mark.rstrip(b"\0"))
        self._refused |= refused
        self.cuts = [*self.cuts, *(cut for cut in found.values() if cut is not None and cut not in self.cuts)]
        return len(refused)

    def _read(self, names: Sequence[str]) -> list[bytes | None]:
        """What marks say; reading them keeps them from being given up before the pages they tell of."""
        marks = [bytearray(MARK_BYTES) for _ in names]
        objects = [StorageObject(name, [memoryview(mark)]) for name, mark in zip(names, marks, strict=True)]
        read = list[bytes | None]()
        for name, mark, outcome in zip(names, marks, self._backend.read(objects), strict=True):
            if isinstance(outcome, StorageError):
                raise outcome
            if isinstance(outcome, CorruptObjectError):
                self._backend.delete(name)
            read.append(bytes(mark) if outcome is True else None)
        return read
