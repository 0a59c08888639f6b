"""Which conversation a request belongs to, for policies that keep one on one replica."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from router.api.headers import header

_HEADER = b"x-session-id"
_FIELDS = ("prompt_cache_key", "session_id", "user")
_MAX_CHARS = 256


def session_of(request: Request, others: Mapping[str, Any]) -> str:
    """``X-Session-Id``, else ``prompt_cache_key``, ``session_id`` or ``user``; empty where none of them is given.

    ``others`` are the undeclared fields of the body; one that is not a text counts as not given.
    """
    named = header(request.scope, _HEADER)
    if named is None and not others:
        return ""
    given = (named, *(others.get(field) for field in _FIELDS))
    return next((text[:_MAX_CHARS] for text in given if isinstance(text, str) and text), "")
