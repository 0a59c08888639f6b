"""Which cuts there are stored pages of. Every writer leaves a mark, and readers look for all that are likely."""

import time
from collections.abc import Callable
from itertools import product

from cluster.spec.registry import KvOwnership
from workers.hicache.storage.interface import StorageBackend
from workers.hicache.storage.objects import Cut, Naming

LIKELY = [
    Cut(ownership, cp, tp, pp)
    for ownership, cp, tp, pp in product(KvOwnership, (*range(1, 9), 16, 32), (1, 2, 4, 8, 16), (1, 2, 4, 8))
]
"""Pages of any other cut are read by replicas of that cut alone."""

_LOOK_AGAIN_S = 10.0


class KnownCuts:
    """The cuts that one rank can read, its own first."""

    def __init__(
        self, backend: StorageBackend, naming: Naming, own: Cut, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend = backend
        self._naming = naming
        self._now_s = now_s
        self._looked_s: float | None = None
        self._is_marked = False
        self.cuts = [own]

    def mark(self) -> None:
        """Leave word of our own pages, once.

        Raises:
            StorageError: it cannot be written.
        """
        if not self._is_marked:
            self._backend.write(self._naming.mark(self.cuts[0]), [memoryview(b"cut")])
            self._is_marked = True

    def look(self) -> None:
        """Look for other cuts, unless that was done a moment ago.

        Raises:
            StorageError: storage cannot tell.
        """
        now_s = self._now_s()
        if self._looked_s is not None and now_s < self._looked_s + _LOOK_AGAIN_S:
            return
        self._looked_s = now_s
        self.cuts += [
            cut for cut in LIKELY if cut not in self.cuts and self._backend.count_leading([self._naming.mark(cut)])
        ]
