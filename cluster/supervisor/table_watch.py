"""Follows the rank table for the driver, until somebody asks there for the cluster's end."""

import time
from collections.abc import Callable

from cluster.launch.tools import Table
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.registry import TableSnapshot

_WATCH_S = 30.0
_RECONNECT_S = 1.0


def follow_table(table: Table, on_table: Callable[[TableSnapshot], None]) -> None:
    """Show every new table, and return after the first that asks for a stop; waits through the service's absence."""
    version = 0
    while True:
        try:
            snapshot = table.watch(version, _WATCH_S)
        except PeerUnreachableError:
            time.sleep(_RECONNECT_S)
            continue
        if snapshot is None:
            continue
        on_table(snapshot)
        if snapshot.stop_requested:
            return
        version = snapshot.version
