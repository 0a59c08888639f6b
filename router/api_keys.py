"""API keys of clients, and their limits."""

import hashlib
import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from cluster.spec.clock import Clock
from cluster.spec.env import ADMIN_KEY, ALLOWED_TOKEN, API_KEYS, parse_token
from cluster.spec.errors import UserError
from cluster.spec.router_config import RouterConfig
from cluster.spec.worker_spec import RouterShare
from router.errors import KeyLimitError
from router.request import ANYBODY

SHARED_SALT = "\0"
"""Salt of all API keys that share their cached prompts."""
_ALLOWED = (
    "a YAML list of entries with name, key and optionally max_requests, tokens_per_minute, priority, weight, cache"
)
_MINUTE_S = 60.0


def _check_key(key: str) -> str:
    try:
        return parse_token(key)
    except ValueError:
        raise PydanticCustomError("key", f"a key has {ALLOWED_TOKEN}") from None


class ApiKey(BaseModel):
    """API key with optional limits; the router's limits apply where a key has none."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00]+$")]
    key: Annotated[str, AfterValidator(_check_key)]
    max_requests: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    """Lowest priority value, and therefore the best priority, that requests with this key can have."""
    weight: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 1.0
    """Share of the cluster, relative to other keys, that this key gets while requests wait."""
    cache: Literal["own", "shared"] = "own"
    """Cached prompts that requests use: this key's, or those of all keys that share theirs."""

    @property
    def salt(self) -> str:
        """Salt that separates the cached prompts of keys. No client can give one that belongs to another key."""
        return SHARED_SALT if self.cache == "shared" else f"{self.name}\0"


class _UnnamedKey(ApiKey):
    """API key from the environment. Its name is a number that another key may have after a restart."""

    @property
    def salt(self) -> str:
        return f"{hashlib.sha256(self.key.encode()).hexdigest()}\0"


class KeyRing:
    """All API keys; if there are none, every client is admitted.

    Only digests of secrets are compared, so that timing reveals nothing about them.
    """

    def __init__(self, keys: Iterable[ApiKey] = (), admin_key: str | None = None) -> None:
        """Hold the keys; without an ``admin_key``, the admin routes are disabled."""
        self._by_digest = {_digest(key.key.encode()): key for key in keys}
        self._admin_digest = None if admin_key is None else _digest(admin_key.encode())

    def __bool__(self) -> bool:
        return bool(self._by_digest)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._by_digest.values())

    @property
    def has_admin(self) -> bool:
        return self._admin_digest is not None

    def find(self, given: bytes) -> ApiKey | None:
        return self._by_digest.get(_digest(given))

    def is_admin(self, given: bytes) -> bool:
        return self._admin_digest == _digest(given)


def read_keys(config: RouterConfig, environ: Mapping[str, str] | None = None) -> KeyRing:
    """Read the keys from the file and the environment.

    Raises:
        UserError: the file is invalid, or two entries have the same name or key; the message never quotes a key.
    """
    given = [_UnnamedKey(name=f"key-{number}", key=key) for number, key in enumerate(API_KEYS.get(environ))]
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
        # Without any keys, every client would be admitted.
        return TypeAdapter(Annotated[list[ApiKey], Field(min_length=1)]).validate_python(tree)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"router.api_keys_file: {path} cannot be read: {reason}") from None
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(step) for step in wrong["loc"]) or "the file"
        raise UserError(f"router.api_keys_file: {path}: {where}: {wrong['msg']}; allowed: {_ALLOWED}") from None
    except (yaml.YAMLError, ValueError, RecursionError):  # an impossible date is a ValueError
        # The parser's message is omitted, since it may quote a key.
        raise UserError(f"router.api_keys_file: {path} is not YAML; allowed: {_ALLOWED}") from None


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


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
