"""Takes the token ids out of a long body before pydantic reads it, which would make a Python number of each.

Anything that is not certainly a list of integers is left to pydantic, which reports what is wrong.
"""

import re
import secrets
from typing import Any

import numpy as np
import simdjson
from pydantic import ValidationInfo, ValidatorFunctionWrapHandler

from cluster.spec.token_ids import TokenIds

_LONG_BYTES = 2048
"""Pydantic is as fast on shorter bodies."""
_PLACEHOLDER = secrets.token_hex(16)
"""Replaces the ids; unknown to the authors of bodies."""
_OPENING = re.compile(rb"\s*:\s*\[")


def cut_ids(body: bytes, field: str) -> tuple[bytes, TokenIds] | None:
    """Split a body into the rest and the ids of a field; None where there are none, or perhaps something else.

    In JSON an unescaped quote after ``{`` or ``,`` only begins a key or a string, so a match is a key, though perhaps
    not of the outermost object: the caller must check that ``put_back`` has put the ids back.
    """
    name = b'"%b"' % field.encode()
    at = body.find(name) if len(body) >= _LONG_BYTES else -1
    opening = _OPENING.match(body, at + len(name)) if at >= 0 else None
    if opening is None or not body[:at].rstrip(b" \t\r\n").endswith((b"{", b",")):
        return None
    start, end = opening.end() - 1, body.find(b"]", opening.end()) + 1
    ids = _read(body[start:end])
    return None if ids is None else (b'%b"%b"%b' % (body[:start], _PLACEHOLDER.encode(), body[end:]), ids)


def put_back(given: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """Validate the field: replace the placeholder by the ids that were cut out."""
    return info.context if given == _PLACEHOLDER and info.context is not None else handler(given)


def _read(numbers: bytes) -> TokenIds | None:
    """Return the ids of a JSON array; None unless it has some, and nothing else."""
    try:
        wide = np.frombuffer(simdjson.Parser().parse(numbers).as_buffer(of_type="i"), np.uint64)  # type: ignore[union-attr]
    except (TypeError, ValueError, RuntimeError):
        # RuntimeError for numbers of more than 64 bits.
        return None
    # Read as unsigned, negative ones are the highest.
    is_sound = len(wide) and wide.max() < 2**31
    return TokenIds(wide.astype("<i4").tobytes()) if is_sound else None
