"""Requests that wait in the router until replicas have room: the most urgent first, then the first to come."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from router.answer import Answer
from router.errors import QueueFullError

Open = Callable[[], Answer]
"""Sends a request to replicas; raises QueueFullError while they have no room for it."""


@dataclass(order=True, slots=True)
class _Waiting:
    priority: int
    number: int
    open: Open = field(compare=False)
    answer: asyncio.Future[Answer] = field(compare=False)


class Gate:
    """Belongs to one event loop. Nobody overtakes a request that is as urgent and came before."""

    def __init__(self, max_waiting: int, max_wait_s: float, elsewhere: Callable[[], int] = int) -> None:
        """``elsewhere`` tells how many wait at other router processes."""
        self._elsewhere = elsewhere
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._is_looking = False
        self._why = ""
        """What the first one waits for."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return sum(not waiting.answer.done() for waiting in self._waiting)

    async def enter(self, open_answer: Open, priority: int) -> Answer:
        """The answer as soon as there is room for the request; whoever gets it must leave it.

        Raises:
            QueueFullError: as many requests wait as may, or this one has waited as long as it may.
            NotReadyError: nothing can be sent any more.
        """
        if not self._waiting:
            try:
                return open_answer()
            except QueueFullError as error:
                self._why = str(error)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(priority, next(self._numbers), open_answer, answer)
        heapq.heappush(self._waiting, waiting)
        self.look()
        try:
            if self.num_waiting + self._elsewhere() > self._max_waiting and not answer.done():
                raise QueueFullError(self._why, "max_waiting_requests")
            async with asyncio.timeout(self._max_wait_s):
                return await answer
        except TimeoutError:
            why = f"{self._why}; waited {self._max_wait_s:g} s (router.max_wait_s)"
            raise QueueFullError(why, "max_wait_s") from None
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                with answer.result():
                    raise
            raise
        finally:
            self._withdraw(waiting)

    def look(self) -> None:
        """Something has ended: let in those for whom there is room now."""
        if self._is_looking:
            return
        self._is_looking = True
        try:
            while self._waiting and self._try_first():
                heapq.heappop(self._waiting)
        finally:
            self._is_looking = False

    def _try_first(self) -> bool:
        """Whether the first one waits no longer."""
        first = self._waiting[0]
        if first.answer.done():
            return True
        try:
            first.answer.set_result(first.open())
        except QueueFullError as error:
            self._why = str(error)
            return False
        except Exception as error:
            first.answer.set_exception(error)
        return True

    def _withdraw(self, waiting: _Waiting) -> None:
        """Whoever waited does not wait any more, which may be what others waited for."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            heapq.heapify(self._waiting)
            self.look()
