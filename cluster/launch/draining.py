"""When a replica that was asked to take no new requests has nothing open any more, as the rank table shows it."""

import time

from cluster.launch.calls import Deadline
from cluster.launch.tools import Table
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.registry import TableSnapshot

_RECONNECT_S = 0.2


def wait_drained(
    table: Table, replica: ReplicaId, incarnation: Incarnation, quiet_s: float, deadline: Deadline
) -> bool:
    """True once this start of a replica drains and has had nothing open for a while; False at the deadline.

    The while is for requests that a router sent before it knew: the replica takes them, and shows them with its next
    heartbeat.
    """
    seen_version, idle_since_s = 0, None
    while left_s := deadline.left_s():
        try:
            snapshot = table.watch(seen_version, min(left_s, quiet_s))
        except PeerUnreachableError:
            time.sleep(min(left_s, _RECONNECT_S))
            continue
        now_s = time.monotonic()
        if snapshot is not None:
            seen_version = snapshot.version
            is_idle = _is_idle(snapshot, replica, incarnation)
            idle_since_s = (idle_since_s or now_s) if is_idle else None
        if idle_since_s is not None and now_s - idle_since_s >= quiet_s:
            return True
    return False


def _is_idle(snapshot: TableSnapshot, replica: ReplicaId, incarnation: Incarnation) -> bool:
    entry = snapshot.find(replica)
    if entry is None or entry.incarnation != incarnation:
        return False
    return entry.load.draining and entry.load.num_waiting == entry.load.num_running == 0
