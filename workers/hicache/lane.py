"""A thread that does one order after another and answers each."""

import logging
import queue
import threading
import time
from collections.abc import Callable

from cluster.channel import Outbox
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.tiers import MovePages, PagesMoved

_log = logging.getLogger(__name__)

Work = Callable[[MovePages, float], PagesMoved]
"""Carries out an order that has waited so many seconds."""


class Lane:
    """Orders of one kind of memory; other lanes go on meanwhile, and so does the forward pass."""

    def __init__(self, name: str, leader_address: str, outbox: Outbox, work: Work) -> None:
        """Takes the outbox over, and starts the thread; ``work`` must answer and not raise."""
        self._leader_address = leader_address
        self._outbox = outbox
        self._work = work
        self._queue: queue.SimpleQueue[tuple[MovePages, float] | None] = queue.SimpleQueue()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, order: MovePages) -> None:
        """Queue an order."""
        self._queue.put((order, time.monotonic()))

    def stop(self) -> None:
        """Let the order at hand end, and leave out the rest."""
        self._is_closing = True
        self._queue.put(None)

    def wait_ended(self, timeout_s: float) -> bool:
        """After ``stop``: whether the order at hand ends in this time. If not, its thread ends with the process."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None and not self._is_closing:
                order, since_s = item
                answer = self._work(order, time.monotonic() - since_s)
                try:
                    self._outbox.send(self._leader_address, answer)
                except PeerUnreachableError as error:
                    _log.warning("%s", error)
        finally:
            self._outbox.close()
