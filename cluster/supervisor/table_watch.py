"""Watch on the rank table for the driver, until the table requests the cluster's end."""

import time
from collections.abc import Callable

from cluster.launch.tools import Table
from cluster.spec.errors import BatonError
from cluster.spec.registry import TableSnapshot

_WATCH_S = 5.0
"""Long-poll timeout, kept short: a service that hangs is only noticed when its response is late."""
_NONE = -1
_RECONNECT_S = 1.0


def follow_table(table: Table, on_table: Callable[[TableSnapshot], None], on_lost: Callable[[], None]) -> None:
    """Report every new table, and return after the first that requests a stop; waits while the service is unavailable.

    ``on_lost`` is called each time that the service gives no table; when it does again, there is a new one.
    """
    version = _NONE
    while True:
        try:
            snapshot = table.watch(version, _WATCH_S)
        except BatonError:  # the service is unavailable, or responds with something else
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
