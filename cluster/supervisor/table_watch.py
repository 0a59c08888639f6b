"""Follows the rank table for the driver, until somebody asks there for the cluster's end."""

import time
from collections.abc import Callable

from cluster.launch.tools import Table
from cluster.spec.errors import BatonError
from cluster.spec.registry import TableSnapshot

_WATCH_S = 5.0
"""Not longer: a service that stands still is only seen when its answer is late."""
_NONE = -1
_RECONNECT_S = 1.0


def follow_table(table: Table, on_table: Callable[[TableSnapshot], None], on_lost: Callable[[], None]) -> None:
    """Show every new table, and return after the first that asks for a stop; waits through the service's absence.

    ``on_lost`` is called each time that the service gives no table; when it does again, there is a new one.
    """
    version = _NONE
    while True:
        try:
            snapshot = table.watch(version, _WATCH_S)
        except BatonError:  # it is not there, or answers with something else than a table
            on_lost()
            version = _NONE
            time.sleep(_RECONNECT_S)
            continue
        if snapshot is None:
            continue
        on_table(snapshot)
        if snapshot.stop_requested:
            return
        version = snapshot.version
