"""A thread that does one order after another, and one that answers each."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from cluster.channel import Outbox
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.tiers import MovePages, PagesMoved

_log = logging.getLogger(__name__)

Work = Callable[[MovePages, float], PagesMoved]
"""Carries out an order that has waited so many seconds."""
Refuse = Callable[[MovePages], PagesMoved]
"""What is said of an order that is not begun any more."""


class Lane:
    """Orders of one kind of memory; other lanes go on meanwhile, and so does the forward pass.

    Work may hang for ever. The order at hand then stays open, since its pages may still be written to; those behind it
    are refused when their patience is over.
    """

    def __init__(self, name: str, leader_address: str, outbox: Outbox, work: Work, refuse: Refuse) -> None:
        """Takes the outbox over, and starts the threads; ``work`` must answer and not raise."""
        self._leader_address = leader_address
        self._outbox = outbox
        self._work = work
        self._refuse = refuse
        self._events = queue.SimpleQueue[tuple[MovePages, float] | PagesMoved | None]()
        """Orders and since when they wait, answers, and the end."""
        self._at_hand = queue.SimpleQueue[tuple[MovePages, float] | None]()
        self._waiting: deque[tuple[MovePages, float]] = deque()
        self._is_busy = False
        self._threads = [
            threading.Thread(target=self._toil, name=f"{name}-work", daemon=True),
            threading.Thread(target=self._run, name=name, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def put(self, order: MovePages) -> None:
        """Queue an order."""
        self._events.put((order, time.monotonic()))

    def stop(self) -> None:
        """Let the order at hand end, and leave out the rest."""
        self._events.put(None)

    def wait_ended(self, timeout_s: float) -> bool:
        """After ``stop``: whether the order at hand ends in this time. If not, its thread ends with the process."""
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _toil(self) -> None:
        while (item := self._at_hand.get()) is not None:
            order, since_s = item
            self._events.put(self._work(order, time.monotonic() - since_s))

    def _run(self) -> None:
        try:
            while self._take_event():
                pass
            self._at_hand.put(None)
            while self._is_busy:
                if isinstance(event := self._events.get(), PagesMoved):
                    self._is_busy = False
                    self._answer(event)
        finally:
            self._outbox.close()

    def _take_event(self) -> bool:
        """False for the end."""
        try:
            event = self._events.get(timeout=self._patience_left_s())
        except queue.Empty:
            self._refuse_late()
            return True
        if event is None:
            return False
        if isinstance(event, PagesMoved):
            self._is_busy = False
            self._answer(event)
        else:
            self._waiting.append(event)
        if self._waiting and not self._is_busy:
            self._is_busy = True
            self._at_hand.put(self._waiting.popleft())
        return True

    def _patience_left_s(self) -> float | None:
        """Of the order behind the one at hand that has least."""
        ends_s = [since_s + order.patience_s for order, since_s in self._waiting if order.patience_s is not None]
        return max(0.0, min(ends_s) - time.monotonic()) if ends_s else None

    def _refuse_late(self) -> None:
        now_s = time.monotonic()
        for item in list(self._waiting):
            order, since_s = item
            if order.patience_s is not None and since_s + order.patience_s <= now_s:
                self._waiting.remove(item)
                self._answer(self._refuse(order))

    def _answer(self, answer: PagesMoved) -> None:
        try:
            self._outbox.send(self._leader_address, answer)
        except PeerUnreachableError as error:
            _log.warning("%s", error)
