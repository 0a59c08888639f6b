"""Liveness of ranks other than the leader: a thread that reports to the bootstrap service."""

import logging
import threading
from collections.abc import Callable

from cluster.bootstrap.client import BootstrapClient
from cluster.bootstrap.table import TableRefusedError
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.registry import RankRow

_log = logging.getLogger(__name__)


class RankKeeper:
    """Thread of one rank. If the process is stopped or its machine is lost, the reports stop too."""

    def __init__(
        self, url: str, token: str, row: RankRow, interval_s: float, on_refused: Callable[[TableRefusedError], None]
    ) -> None:
        """Prepare the thread; it calls ``on_refused``, as its last action, if a later start of the replica is known."""
        self._client = BootstrapClient(url, token)
        self._row = row
        self._interval_s = interval_s
        self._on_refused = on_refused
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alive", daemon=True)

    def start(self) -> None:
        """Start the thread; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
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
