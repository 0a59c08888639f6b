"""Queue of requests for free capacity at replicas."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from router.answer import Answer
from router.errors import QueueFullError
from router.fair_queue import FairQueue
from router.request import ANYBODY

MAX_LOOK_S = 0.005
"""Time after which other work of the event loop comes before further requests. Each may have many choices to send."""
Open = Callable[[], Answer]
"""Function that sends a request to replicas, or raises QueueFullError while they are full."""


@dataclass(eq=False, slots=True)
class _Waiting:
    open: Open
    cost: float
    answer: asyncio.Future[Answer]


class Gate:
    """Fair queue of requests that wait for capacity at replicas.

    If there is not enough for the first one, those of other tenants pass it until they have taken as much as it needs.
    So a large request waits for capacity without closing the gate to all.

    Not thread-safe: all methods run in one event loop.
    """

    def __init__(self, max_waiting: int, max_wait_s: float) -> None:
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._waiting: FairQueue[_Waiting] = FairQueue()
        self._is_looking = False
        """True while requests are admitted, also in a later pass of the event loop."""
        self._why = ""
        """Reason why the first request waits."""
        self._passed: _Waiting | None = None
        self._num_passing = 0.0
        """Cost of the requests that have passed ``_passed``, which is the first one."""

    @property
    def num_waiting(self) -> int:
        return sum(not waiting.answer.done() for waiting in self._waiting)

    async def enter(
        self, open_answer: Open, priority: int, tenant: str = ANYBODY, weight: float = 1.0, cost: float = 1.0
    ) -> Answer:
        """Wait for capacity, send the request to replicas, and return its answer, for use in a ``with`` statement.

        Args:
            cost: number of tokens that the request may take.

        Raises:
            QueueFullError: too many requests of this tenant are waiting, or this one has waited too long.
            NotReadyError: the router accepts no more requests.
        """
        if not self._waiting:
            try:
                return open_answer()
            except QueueFullError as error:
                self._why = str(error)
        waiting = _Waiting(open_answer, cost, asyncio.get_running_loop().create_future())
        self._waiting.push(waiting, tenant, cost, weight, priority)
        self.look()
        try:
            self._drop_one_too_many()
            # Unlike a timeout, `wait` never cancels an answer that is there already.
            if not (await asyncio.wait([waiting.answer], timeout=self._max_wait_s))[0]:
                why = f"waited {self._max_wait_s:g} s (router.max_wait_s): {self._why}"
                raise QueueFullError(why, "max_wait_s")
            return waiting.answer.result()
        except asyncio.CancelledError:
            answer = waiting.answer
            if answer.done() and answer.exception() is None:
                with answer.result():
                    raise
            raise
        finally:
            self._waiting.remove(waiting)
            self.look()  # the next one may need less capacity

    def look(self) -> None:
        """Admit the requests for which there is capacity now. Called whenever capacity may have changed."""
        if self._is_looking or not self._waiting:
            return
        self._is_looking, end_s = True, time.perf_counter() + MAX_LOOK_S
        while self._waiting and self._try(self._waiting.first):
            self._waiting.pop()
            if time.perf_counter() > end_s:
                asyncio.get_running_loop().call_soon(self._go_on)
                return
        if self._waiting:
            self._let_pass(self._waiting.first)
        self._is_looking = False

    def _go_on(self) -> None:
        self._is_looking = False
        self.look()

    def _let_pass(self, first: _Waiting) -> None:
        """Admit requests of other tenants for which there is capacity, although there is not enough for the first."""
        if first is not self._passed:
            self._passed, self._num_passing = first, 0.0
        why = self._why
        for other in self._waiting.behind_first():
            may_pass = not other.answer.done() and self._num_passing + other.cost <= first.cost
            if may_pass and self._try(other):
                self._waiting.take(other)
                self._num_passing += other.cost
        self._why = why

    def _drop_one_too_many(self) -> None:
        """Refuse a request of the tenant with the most requests if the queue is too long."""
        if self.num_waiting > self._max_waiting:
            dropped = self._waiting.least_entitled()
            self._waiting.remove(dropped)
            if not dropped.answer.done():
                dropped.answer.set_exception(QueueFullError(self._why, "max_waiting_requests"))

    def _try(self, waiting: _Waiting) -> bool:
        """Try to admit a request; return whether it leaves the queue."""
        if waiting.answer.done():
            return True
        try:
            waiting.answer.set_result(waiting.open())
        except QueueFullError as error:
            self._why = str(error)
            return False
        except Exception as error:
            waiting.answer.set_exception(error)
        return True
