"""Drain detection: decide from the rank table when a replica that takes no new requests has none left."""

import time
from collections.abc import Callable

from cluster.bootstrap.client import follow_table
from cluster.launch.calls import Deadline
from cluster.launch.tools import Table
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.registry import TableSnapshot

QUIET_HEARTBEATS = 2.5
"""Heartbeats without an open or new request before a replica counts as drained; two of them must have reported it."""
TELL_AGAIN_S = 2.0
"""Time after which an unacknowledged message to a replica is repeated."""


class DrainWatch:
    """Drain state of one start of a replica. Sans I/O.

    The first report of no open requests is not enough: a router may have sent a request before it knew of the drain,
    and the last tokens of a short request, which came and went between two heartbeats, may still be in flight.
    """

    def __init__(self, replica: ReplicaId, incarnation: Incarnation, heartbeat_s: float) -> None:
        self._replica = replica
        self._incarnation = incarnation
        self._quiet_s = QUIET_HEARTBEATS * heartbeat_s
        self._since_s = 0.0
        self._num_taken: int | None = None
        """Requests taken, by the newest heartbeat if it showed nothing open; None otherwise."""

    def saw(self, snapshot: TableSnapshot | None, now_s: float) -> None:
        """Update from a new table; None if there is none."""
        num_taken = None if snapshot is None else self._taken_if_empty(snapshot)
        if num_taken != self._num_taken:
            self._num_taken, self._since_s = num_taken, now_s

    def is_over(self, now_s: float) -> bool:
        """Return whether the replica has been empty for long enough."""
        return self._num_taken is not None and now_s - self._since_s >= self._quiet_s

    def _taken_if_empty(self, snapshot: TableSnapshot) -> int | None:
        entry = snapshot.find(self._replica)
        if entry is None or entry.incarnation != self._incarnation:
            return None
        load = entry.load
        is_storing = load.tiers is not None and load.tiers.is_storing
        is_empty = load.draining and load.num_waiting == load.num_running == 0 and not is_storing
        return load.num_taken if is_empty else None


def tell_until(
    table: Table, is_shown: Callable[[TableSnapshot], bool], tell: Callable[[], None], deadline: Deadline
) -> bool:
    """Send a message, at least once, until the table shows that it arrived; False at the deadline."""
    tell()
    again = Deadline(TELL_AGAIN_S)
    for snapshot in follow_table(table.watch, lambda: min(deadline.left_s(), TELL_AGAIN_S)):
        if snapshot is not None and is_shown(snapshot):
            return True
        if not deadline.left_s():
            break
        if not again.left_s():
            tell()
            again = Deadline(TELL_AGAIN_S)
    return False


def wait_drained(table: Table, watch: DrainWatch, poll_s: float, deadline: Deadline) -> bool:
    """Wait until the watch is over; False at the deadline. Checks the clock at least every ``poll_s``."""

    def on_lost() -> None:
        watch.saw(None, time.monotonic())

    for snapshot in follow_table(table.watch, lambda: min(deadline.left_s(), poll_s), on_lost):
        if snapshot is not None:
            watch.saw(snapshot, time.monotonic())
        if watch.is_over(time.monotonic()):
            return True
        if not deadline.left_s():
            break
    return False
