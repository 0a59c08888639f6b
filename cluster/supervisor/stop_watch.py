"""Waits until somebody asks the whole cluster to stop, through the bootstrap service."""

import time
from collections.abc import Callable

from cluster.launch.tools import Table
from cluster.spec.errors import PeerUnreachableError

_WATCH_S = 30.0
_RECONNECT_S = 1.0


def watch_stop(table: Table, on_stop: Callable[[], None]) -> None:
    """Return after the first request, having called ``on_stop``; waits through the absence of the service."""
    version = 0
    while True:
        try:
            snapshot = table.watch(version, _WATCH_S)
        except PeerUnreachableError:
            time.sleep(_RECONNECT_S)
            continue
        if snapshot is None:
            continue
        if snapshot.stop_requested:
            on_stop()
            return
        version = snapshot.version
