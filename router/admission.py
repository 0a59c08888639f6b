"""Admission of requests before they are sent to replicas: the limits of each key, and the queue for free capacity."""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.spec.clock import Clock
from cluster.spec.config import RouterConfig
from cluster.spec.worker_spec import RouterShare
from router.answer import Answer
from router.errors import KeyLimitError, QueueFullError
from router.key_ring import ApiKey

ANYBODY = "anybody"
"""The account of all clients where no key is needed."""
_MINUTE_S = 60.0

Open = Callable[[], Answer]
"""Sends a request to replicas; raises QueueFullError while they have no room for it."""


@dataclass(frozen=True, slots=True)
class Limit:
    max_requests: int | None
    tokens_per_minute: int | None


def limit_of(config: RouterConfig, key: ApiKey | None, share: RouterShare) -> tuple[str, Limit]:
    """Return the account of a key and its limits in this process; clients without a key share an account."""
    max_requests, per_minute = config.key_max_requests, config.key_tokens_per_minute
    if key is not None:
        max_requests, per_minute = key.max_requests or max_requests, key.tokens_per_minute or per_minute
    limit = Limit(max_requests and share.of(max_requests), per_minute and share.of(per_minute))
    return (ANYBODY if key is None else key.name), limit


@dataclass(slots=True)
class _Account:
    num_open: int = 0
    spent: float = 0.0
    """Tokens used and not yet refilled."""
    as_of_s: float = 0.0


class KeyLimits:
    """Open requests and spent tokens of each key. Sans I/O.

    A minute's tokens are a bucket that fills steadily. A request is admitted while anything is in it, and its prompt
    and answer are taken out once they are known; so one request may overdraw a bucket, and a long prompt does not need
    one of its length.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    @contextmanager
    def open(self, name: str, limit: Limit) -> Generator[None, None, None]:
        """Count one request of a key as open, unless the key has reached a limit."""
        account = self._accounts.setdefault(name, _Account())
        self._check(account, name, limit)
        account.num_open += 1
        try:
            yield
        finally:
            account.num_open -= 1

    def spend(self, name: str, limit: Limit, num_tokens: int) -> None:
        if limit.tokens_per_minute is not None:
            account = self._accounts[name]
            self._refill(account, limit.tokens_per_minute)
            account.spent += num_tokens

    def _check(self, account: _Account, name: str, limit: Limit) -> None:
        if limit.max_requests is not None and account.num_open >= limit.max_requests:
            message = f"{name}: {account.num_open} requests are open; allowed: {limit.max_requests} requests at once"
            raise KeyLimitError(message, "max_requests")
        if limit.tokens_per_minute is None:
            return
        self._refill(account, limit.tokens_per_minute)
        over = account.spent - limit.tokens_per_minute
        if over >= 0:
            wait_s = max(1, math.ceil((over + 1) * _MINUTE_S / limit.tokens_per_minute))
            message = f"{name}: this minute's tokens are used up; allowed: {limit.tokens_per_minute} a minute"
            raise KeyLimitError(message, "tokens_per_minute", wait_s)

    def _refill(self, account: _Account, tokens_per_minute: int) -> None:
        now_s = self._clock.now_s()
        refilled = (now_s - account.as_of_s) * tokens_per_minute / _MINUTE_S
        account.spent, account.as_of_s = max(0.0, account.spent - refilled), now_s


@dataclass(order=True, slots=True)
class _Waiting:
    priority: int
    number: int
    open: Open = field(compare=False)
    answer: asyncio.Future[Answer] = field(compare=False)


class Gate:
    """Requests that wait until replicas have room: the most urgent first, then in order of arrival.

    Belongs to one event loop. Nobody overtakes a request that is as urgent and came before.
    """

    def __init__(self, max_waiting: int, max_wait_s: float) -> None:
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._is_looking = False
        self._why = ""
        """Reason why the first request waits."""

    @property
    def num_waiting(self) -> int:
        return sum(not waiting.answer.done() for waiting in self._waiting)

    async def enter(self, open_answer: Open, priority: int) -> Answer:
        """Return the answer as soon as there is room for the request; the caller must leave it.

        Raises:
            QueueFullError: too many requests wait, or this one has waited too long.
            NotReadyError: no requests can be sent any more.
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
            if self.num_waiting > self._max_waiting and not answer.done():
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
        """Admit the requests for which there is room now; called when something has ended."""
        if self._is_looking:
            return
        self._is_looking = True
        try:
            while self._waiting and self._try_first():
                heapq.heappop(self._waiting)
        finally:
            self._is_looking = False

    def _try_first(self) -> bool:
        """Return whether the first one waits no longer."""
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
        """Remove one that does not wait any more, which may be what others waited for."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            heapq.heapify(self._waiting)
            self.look()
