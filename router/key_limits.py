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
from router.errors import KeyLimitError
from router.key_ring import ApiKey

ANYBODY = "anybody"
"""Account of all who ask where no key is needed."""

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Limit:
    """What one key may; None for no limit."""

    max_requests: int | None
    tokens_per_minute: int | None


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


class KeyLimits:
    """The accounts of all keys, by name."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    @contextmanager
    def open(self, name: str, limit: Limit) -> Generator[None, None, None]:
        """While one request of a key is open.

        Raises:
            KeyLimitError: the key has as many requests open, or has used as many tokens, as it may.
        """
        account = self._accounts.setdefault(name, _Account())
        self._check(account, name, limit)
        account.num_open += 1
        try:
            yield
        finally:
            account.num_open -= 1

    def spend(self, name: str, limit: Limit, num_tokens: int) -> None:
        """An open request of a key has used tokens."""
        if limit.tokens_per_minute is not None:
            self._pass_time(self._accounts[name], limit.tokens_per_minute)
            self._accounts[name].spent += num_tokens

    def _check(self, account: _Account, name: str, limit: Limit) -> None:
        if limit.max_requests is not None and account.num_open >= limit.max_requests:
            allowed = f"{limit.max_requests} requests at once"
            raise KeyLimitError(f"{name}: {account.num_open} requests are open; allowed: {allowed}", 1)
        if limit.tokens_per_minute is None:
            return
        self._pass_time(account, limit.tokens_per_minute)
        over = account.spent - limit.tokens_per_minute
        if over >= 0:
            wait_s = max(1, math.ceil((over + 1) * _MINUTE_S / limit.tokens_per_minute))
            message = f"{name}: its tokens of this minute are used up; allowed: {limit.tokens_per_minute} a minute"
            raise KeyLimitError(message, wait_s)

    def _pass_time(self, account: _Account, tokens_per_minute: int) -> None:
        now_s = self._clock.now_s()
        made_good = (now_s - account.as_of_s) * tokens_per_minute / _MINUTE_S
        account.spent, account.as_of_s = max(0.0, account.spent - made_good), now_s
