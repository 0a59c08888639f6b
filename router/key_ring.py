"""The API keys of a router, and their limits."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from cluster.spec.config import RouterConfig
from cluster.spec.env import ADMIN_KEY, API_KEYS
from cluster.spec.errors import UserError

_ALLOWED = "a YAML list of entries with name, key and optionally max_requests, tokens_per_minute, priority"


class ApiKey(BaseModel):
    """One key; limits that are not given are the router's."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(min_length=1, max_length=64)]
    key: Annotated[str, Field(min_length=8, pattern=r"^[\x21-\x7e]+$")]
    max_requests: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    priority: int | None = None
    """Maximum priority of its requests."""


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All keys. Without any, every client is admitted, and all share the router's limits for one key."""

    keys: tuple[ApiKey, ...] = ()
    admin_key: str | None = None
    """None closes the administrator's routes."""

    def find(self, given: str) -> ApiKey | None:
        """Return the owner of this key, in a time that does not depend on it."""
        matching = [key for key in self.keys if _same(key.key, given)]
        return matching[0] if matching else None

    def is_admin(self, given: str) -> bool:
        return self.admin_key is not None and _same(self.admin_key, given)


def read_keys(config: RouterConfig, environ: Mapping[str, str] | None = None) -> KeyRing:
    """Read the keys of the file and of the environment.

    Raises:
        UserError: the file cannot be used, or two keys are alike; never quotes a key.
    """
    given = [ApiKey(name=f"key-{number}", key=key) for number, key in enumerate(API_KEYS.get(environ))]
    keys = [*_of_file(config.api_keys_file), *given]
    for what in ("name", "key"):
        if len({getattr(key, what) for key in keys}) < len(keys):
            raise UserError(f"API keys: two have the same {what}; allowed: each {what} once")
    return KeyRing(tuple(keys), ADMIN_KEY.get(environ))


def _of_file(path: str | None) -> list[ApiKey]:
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
    except (yaml.YAMLError, ValueError, RecursionError):  # a date that cannot be is a ValueError
        # The parser's message is left out: it may quote a key.
        raise UserError(f"router.api_keys_file: {path} is not YAML; allowed: {_ALLOWED}") from None


def _same(known: str, given: str) -> bool:
    return hmac.compare_digest(known.encode(), given.encode())
