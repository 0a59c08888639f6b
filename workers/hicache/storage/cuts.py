"""Which cuts there are stored pages of: every writer leaves a mark under a number that is free, and readers read all.

So nobody has to list what is stored, nor to guess at cuts.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from workers.hicache.storage.batches import results
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
        self._unreadable: set[str] = set()
        """Marks that could not be read when they were last looked at."""
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
        own = self._naming.mark_of(self.cuts[0])
        if self._own_mark is None or self._read([self._own_mark]) != {self._own_mark: own}:
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
            before = self._unreadable
            marks = self._read(self._backend.present(dict.fromkeys(self._names, 0)))
            return self._take_in(list(marks.values())) + len(self._unreadable - before)
        finally:
            self._looking.release()

    def _leave_mark(self) -> str | None:
        """Where it is: of several who write to one name at once, only one is read there, and the others go on."""
        own = self._naming.mark_of(self.cuts[0])
        taken = self._backend.present(dict.fromkeys(self._names, 0))
        marks = self._read(taken)
        for name in self._names:
            if name not in taken:
                write_one(self._backend, name, [memoryview(own)])
                marks |= self._read_back(name)
            if marks.get(name) == own:
                return name
        _log.warning("there are marks of %d other cuts: replicas of those do not find these pages", NUM_MARKS)
        return None

    def _take_in(self, marks: Sequence[bytes]) -> int:
        found = {mark: self._naming.cut_of(mark) for mark in marks}
        refused = {mark for mark, cut in found.items() if cut is None} - self._refused
        for mark in refused:
            _log.warning("pages of %r cannot be read", mark.rstrip(b"\0"))
        self._refused |= refused
        self.cuts = [*self.cuts, *(cut for cut in found.values() if cut is not None and cut not in self.cuts)]
        return len(refused)

    def _read_back(self, name: str) -> dict[str, bytes]:
        """What a mark that we have just left says.

        Raises:
            StorageError: it cannot be read; it is not left there, or every try would leave one more.
        """
        marks = self._read([name])
        if name in self._unreadable:
            self._backend.delete(name)
            raise StorageError(f"{name} cannot be read after it was written")
        return marks

    def _read(self, names: Sequence[str]) -> dict[str, bytes]:
        """What marks say; reading them keeps them from being given up before the pages they tell of.

        One that cannot be read tells of nothing, and hides no other.
        """
        if not names:
            return {}
        marks = [bytearray(MARK_BYTES) for _ in names]
        objects = [StorageObject(name, [memoryview(mark)]) for name, mark in zip(names, marks, strict=True)]
        read, unreadable = dict[str, bytes](), set[str]()
        for name, mark, outcome in zip(names, marks, results(self._backend.read, objects), strict=False):
            try:
                if isinstance(outcome, StorageError):
                    raise outcome
                if isinstance(outcome, CorruptObjectError):
                    self._backend.delete(name)
                elif outcome:
                    read[name] = bytes(mark)
            except StorageError as error:
                unreadable.add(name)
                if name not in self._unreadable:
                    _log.warning("%s", error)
        self._unreadable = self._unreadable - set(names) | unreadable
        return read
