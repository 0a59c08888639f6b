"""How a rank that is no leader shows that it lives: a thread that says so to the bootstrap service."""

import logging
import threading
from collections.abc import Callable

from cluster.bootstrap.client import BootstrapClient
from cluster.bootstrap.table import TableRefusedError
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.registry import RankRow

_log = logging.getLogger(__name__)


class RankKeeper:
    """One rank's thread. A process that is stopped, or whose machine is lost, falls silent with it."""

    def __init__(
        self, url: str, token: str, row: RankRow, interval_s: float, on_refused: Callable[[TableRefusedError], None]
    ) -> None:
        """``on_refused`` is told, on the thread, that a later start of the replica is known; it is the last word."""
        self._client = BootstrapClient(url, token)
        self._row = row
        self._interval_s = interval_s
        self._on_refused = on_refused
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alive", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._client.alive(self._row)
            except PeerUnreachableError as error:
                _log.info("%s", error)
            except TableRefusedError as error:
                self._on_refused(error)
                return
            self._stopping.wait(self._interval_s)
