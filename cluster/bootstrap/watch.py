"""Rank table that wakes its watchers when it changes. One event loop makes all calls; nothing polls."""

import asyncio

from cluster.bootstrap.table import BootstrapTable
from cluster.spec.clock import Clock
from cluster.spec.registry import TableSnapshot


class WatchedTable:
    """Table with its clock and its watchers."""

    def __init__(self, table: BootstrapTable, clock: Clock) -> None:
        self.table = table
        self._clock = clock
        self._seen_version = table.version
        self._changed = asyncio.Event()
        self._closing = False

    def now_s(self) -> float:
        """Current time of the table's clock."""
        return self._clock.now_s()

    def wake_if_changed(self) -> None:
        """Wake watchers if the table changed; call after every request that may change it."""
        if self.table.version != self._seen_version:
            self._seen_version = self.table.version
            self._wake()

    def close(self) -> None:
        """End all watches, now and from now on."""
        self._closing = True
        self._wake()

    async def watch(self, version: int, timeout_s: float) -> TableSnapshot | None:
        """Return the table once its version differs; None if nothing changes in time.

        Any other version counts, not only a higher one: a restarted service may start from any number.
        """
        deadline_s = self.now_s() + timeout_s
        while True:
            changed, now_s = self._changed, self.now_s()
            self.table.expire(now_s)
            if self.table.version != version:
                return self.table.snapshot(now_s)
            if now_s >= deadline_s or self._closing:
                return None
            expiry_s = self.table.next_expiry_s()
            until_s = deadline_s if expiry_s is None else min(deadline_s, expiry_s)
            try:
                await asyncio.wait_for(changed.wait(), until_s - now_s)
            except TimeoutError:
                continue

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
