"""The headers of a request, several of which are looked for in each."""

from collections.abc import MutableMapping
from typing import Any

_KEY = "baton.headers"


def header(scope: MutableMapping[str, Any], name: bytes) -> str | None:
    """The first one of this name, which is given in lower case."""
    known: dict[bytes, bytes] | None = scope.get(_KEY)
    if known is None:
        known = scope[_KEY] = dict(reversed(scope["headers"]))
    value = known.get(name)
    return None if value is None else value.decode("latin-1")
