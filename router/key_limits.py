"""What each key has open and has spent, against what it may. Sans I/O.

A minute's tokens are a bucket that fills steadily. A request is let in while there is anything in it, and what it
used, prompt and answer, is taken out when that is known; so a bucket may be overdrawn by what one request uses, and
a long prompt does not need a bucket of its length.
"""

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from cluster.spec.clock import Clock
from cluster.spec.config import RouterConfig
from cluster.spec.worker_spec import RouterPlace
from router.errors import KeyLimitError
from router.key_ring import ApiKey
from router.siblings import Account, Siblings

ANYBODY = "anybody"
"""Account of all who ask where no key is needed."""

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Limit:
    """What one key may; None for no limit."""

    max_requests: int | None
    tokens_per_minute: int | None


NO_LIMIT = Limit(None, None)


def limit_of(config: RouterConfig, key: ApiKey | None) -> tuple[str, Limit]:
    """The account of a key, and what it may; those who need no key share one."""
    if key is None:
        return ANYBODY, Limit(config.key_max_requests, config.key_tokens_per_minute)
    max_requests = key.max_requests or config.key_max_requests
    return key.name, Limit(max_requests, key.tokens_per_minute or config.key_tokens_per_minute)


@dataclass(slots=True)
class _Account:
    num_open: int = 0
    spent: float = 0.0
    """Tokens used and not yet made good by time."""
    as_of_s: float = 0.0
    num_tokens: int = 0
    """Used here since the start."""
    num_elsewhere: int = 0
    """Of those used at other router processes, the ones that are in ``spent``."""


class KeyLimits:
    """The accounts of all keys, by name. What a key does at other router processes counts as well."""

    def __init__(self, clock: Clock, siblings: Siblings | None = None) -> None:
        self._clock = clock
        self._siblings = siblings or Siblings(RouterPlace())
        self._accounts: dict[str, _Account] = {}

    @contextmanager
    def open(self, name: str, limit: Limit) -> Generator[None, None, None]:
        """While one request of a key is open.

        Raises:
            KeyLimitError: the key has as many requests open, or has used as many tokens, as it may.
        """
        if name not in self._accounts:
            known = self._siblings.account(name)
            self._accounts[name] = _Account(0, known.spent, known.as_of_s, num_elsewhere=known.num_tokens)
        account = self._accounts[name]
        # Told before it is checked: of two processes that let the last one in at once, neither does.
        self._open(account, 1, limit)
        try:
            self._check(account, name, limit)
            yield
        finally:
            self._open(account, -1, limit)

    def spend(self, name: str, limit: Limit, num_tokens: int) -> None:
        """An open request of a key has used tokens."""
        account = self._accounts[name]
        account.num_tokens += num_tokens
        if limit.tokens_per_minute is not None:
            self._pass_time(account, name, limit.tokens_per_minute)
            account.spent += num_tokens

    def told(self) -> dict[str, Account]:
        """For other router processes, who may know less of a key."""
        return {
            name: Account(account.num_open, account.num_tokens, account.spent, account.as_of_s)
            for name, account in self._accounts.items()
        }

    def _open(self, account: _Account, change: int, limit: Limit) -> None:
        account.num_open += change
        if limit != NO_LIMIT:
            self._siblings.tell()

    def _check(self, account: _Account, name: str, limit: Limit) -> None:
        if limit.max_requests is not None:
            num_others = account.num_open - 1 + self._siblings.account(name).num_open
            if num_others >= limit.max_requests:
                allowed = f"{limit.max_requests} requests at once"
                raise KeyLimitError(f"{name}: {num_others} requests are open; allowed: {allowed}", 1, "max_requests")
        if limit.tokens_per_minute is None:
            return
        self._pass_time(account, name, limit.tokens_per_minute)
        over = account.spent - limit.tokens_per_minute
        if over >= 0:
            wait_s = max(1, math.ceil((over + 1) * _MINUTE_S / limit.tokens_per_minute))
            message = f"{name}: its tokens of this minute are used up; allowed: {limit.tokens_per_minute} a minute"
            raise KeyLimitError(message, wait_s, "tokens_per_minute")

    def _pass_time(self, account: _Account, name: str, tokens_per_minute: int) -> None:
        now_s = self._clock.now_s()
        made_good = (now_s - account.as_of_s) * tokens_per_minute / _MINUTE_S
        num_elsewhere = self._siblings.account(name).num_tokens
        # Fewer than before: a process has started again, and counts from nothing.
        new = num_elsewhere - account.num_elsewhere if num_elsewhere >= account.num_elsewhere else num_elsewhere
        account.num_elsewhere = num_elsewhere
        account.spent, account.as_of_s = max(0.0, account.spent - made_good) + new, now_s
