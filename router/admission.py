"""Admission of requests: API keys, their limits, and the queue for free capacity at replicas."""

import asyncio
import hmac
import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from cluster.spec.clock import Clock
from cluster.spec.config import RouterConfig
from cluster.spec.env import ADMIN_KEY, API_KEYS
from cluster.spec.errors import UserError
from cluster.spec.worker_spec import RouterShare
from router.answer import Answer
from router.errors import KeyLimitError, QueueFullError
from router.fair_queue import FairQueue
from router.request import ANYBODY

SHARED_SALT = "\0"
"""Salt of all API keys that share their cached prompts."""
_ALLOWED = (
    "a YAML list of entries with name, key and optionally max_requests, tokens_per_minute, priority, weight, cache"
)
_MINUTE_S = 60.0

Open = Callable[[], Answer]
"""Function that sends a request to replicas, or raises QueueFullError while they are full."""


class ApiKey(BaseModel):
    """API key with optional limits; the router's limits apply where a key has none."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00]+$")]
    key: Annotated[str, Field(min_length=8, pattern=r"^[\x21-\x7e]+$")]
    max_requests: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    priority: int = 0
    """Lowest priority value, and therefore the best priority, that requests with this key can have."""
    weight: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 1.0
    """Share of the cluster, relative to other keys, that this key gets while requests wait."""
    cache: Literal["own", "shared"] = "own"
    """Cached prompts that requests use: this key's, or those of all keys that share theirs."""

    @property
    def salt(self) -> str:
        """Salt that separates the cached prompts of keys. No client can give one that belongs to another key."""
        return SHARED_SALT if self.cache == "shared" else f"{self.name}\0"


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All API keys; if there are none, every client is admitted."""

    keys: tuple[ApiKey, ...] = ()
    admin_key: str | None = None
    """Key for the admin routes; None disables them."""

    def find(self, given: str) -> ApiKey | None:
        """Return the API key with this secret, or None; secrets are compared in constant time."""
        matching = [key for key in self.keys if _is_same(key.key, given)]
        return matching[0] if matching else None

    def is_admin(self, given: str) -> bool:
        return self.admin_key is not None and _is_same(self.admin_key, given)


def read_keys(config: RouterConfig, environ: Mapping[str, str] | None = None) -> KeyRing:
    """Read the keys from the file and the environment.

    Raises:
        UserError: the file is invalid, or two entries have the same name or key; the message never quotes a key.
    """
    given = [ApiKey(name=f"key-{number}", key=key) for number, key in enumerate(API_KEYS.get(environ))]
    keys = [*_read_file(config.api_keys_file), *given]
    for what in ("name", "key"):
        if len({getattr(key, what) for key in keys}) < len(keys):
            raise UserError(f"API keys: two entries have the same {what}; allowed: each {what} once")
    return KeyRing(tuple(keys), ADMIN_KEY.get(environ))


def _read_file(path: str | None) -> list[ApiKey]:
    if path is None:
        return []
    try:
        tree: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        return TypeAdapter(list[ApiKey]).validate_python(tree)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"router.api_keys_file: {path} cannot be read: {error}") from None
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(step) for step in wrong["loc"]) or "the file"
        raise UserError(f"router.api_keys_file: {path}: {where}: {wrong['msg']}; allowed: {_ALLOWED}") from None
    except (yaml.YAMLError, ValueError, RecursionError):  # an impossible date is a ValueError
        # The parser's message is omitted, since it may quote a key.
        raise UserError(f"router.api_keys_file: {path} is not YAML; allowed: {_ALLOWED}") from None


def _is_same(known: str, given: str) -> bool:
    return hmac.compare_digest(known.encode(), given.encode())


@dataclass(slots=True)
class Account:
    """Open requests, counted by choices, and used tokens of one key.

    Tokens come from a bucket that refills steadily. A request is admitted unless the bucket is empty, and its tokens
    are taken out when it ends. A request may therefore overdraw the bucket, and a long prompt needs no larger bucket.
    In the same way, the choices of one request may exceed the limit on open ones.
    """

    name: str
    max_requests: int | None
    tokens_per_minute: int | None
    clock: Clock
    num_open: int = 0
    used: float = 0.0
    """Tokens used and not yet refilled."""
    as_of_s: float = 0.0

    def use(self, num_tokens: int) -> None:
        if self.tokens_per_minute is not None:
            self._refill(self.tokens_per_minute)
            self.used += num_tokens

    def check(self) -> None:
        if self.max_requests is not None and self.num_open >= self.max_requests:
            message = f"{self.name}: {self.num_open} requests are open; allowed: {self.max_requests} requests at once"
            raise KeyLimitError(message, "max_requests")
        if self.tokens_per_minute is None:
            return
        self._refill(self.tokens_per_minute)
        over = self.used - self.tokens_per_minute
        if over >= 0:
            wait_s = max(1, math.ceil((over + 1) * _MINUTE_S / self.tokens_per_minute))
            message = f"{self.name}: this minute's tokens are used up; allowed: {self.tokens_per_minute} per minute"
            raise KeyLimitError(message, "tokens_per_minute", wait_s)

    def _refill(self, tokens_per_minute: int) -> None:
        now_s = self.clock.now_s()
        refilled = (now_s - self.as_of_s) * tokens_per_minute / _MINUTE_S
        self.used, self.as_of_s = max(0.0, self.used - refilled), now_s


class KeyLimits:
    """Accounts of all keys in one router process, with this process's share of every limit. Sans I/O."""

    def __init__(self, config: RouterConfig, share: RouterShare, clock: Clock) -> None:
        self._config = config
        self._share = share
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    @contextmanager
    def open(self, key: ApiKey | None, num_choices: int = 1) -> Generator[Account, None, None]:
        """Count one more request of a key, with all its choices, as open until the context exits.

        Raises:
            KeyLimitError: the key has reached a limit.
        """
        name = ANYBODY if key is None else key.name
        account = self._accounts.get(name) or self._accounts.setdefault(name, self._new(name, key))
        account.check()
        account.num_open += num_choices
        try:
            yield account
        finally:
            account.num_open -= num_choices

    def _new(self, name: str, key: ApiKey | None) -> Account:
        max_requests, per_minute = self._config.key_max_requests, self._config.key_tokens_per_minute
        if key is not None:
            max_requests, per_minute = key.max_requests or max_requests, key.tokens_per_minute or per_minute
        share = self._share.of
        return Account(name, max_requests and share(max_requests), per_minute and share(per_minute), self._clock)


@dataclass(eq=False, slots=True)
class _Waiting:
    open: Open
    cost: float
    answer: asyncio.Future[Answer]


class Gate:
    """Fair queue of requests that wait for capacity at replicas.

    If there is not enough for the first one, those of other tenants pass it until they have taken as much as it needs.
    So a large request waits for room without closing the gate to all.

    Not thread-safe: all methods run in one event loop.
    """

    def __init__(self, max_waiting: int, max_wait_s: float) -> None:
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._waiting: FairQueue[_Waiting] = FairQueue()
        self._is_looking = False
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
            async with asyncio.timeout(self._max_wait_s):
                return await waiting.answer
        except TimeoutError:
            why = f"waited {self._max_wait_s:g} s (router.max_wait_s): {self._why}"
            raise QueueFullError(why, "max_wait_s") from None
        except asyncio.CancelledError:
            answer = waiting.answer
            if answer.done() and not answer.cancelled() and answer.exception() is None:
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
        self._is_looking = True
        try:
            while self._waiting and self._try(self._waiting.first):
                self._waiting.pop()
            if self._waiting:
                self._let_pass(self._waiting.first)
        finally:
            self._is_looking = False

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
