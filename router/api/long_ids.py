"""Takes the token ids out of a long body before pydantic reads it, which would make a Python number of each.

Whatever is not surely a list of whole numbers is left to pydantic, whose words for what is wrong are the only ones.
"""

import re
import secrets
import threading
from typing import Any

import numpy as np
import simdjson
from pydantic import ValidationInfo, ValidatorFunctionWrapHandler

from cluster.spec.token_ids import TokenIds

_LONG_BYTES = 2048
"""Pydantic reads shorter bodies as fast."""
_KEPT_BYTES = 2**20
"""A parser keeps its memory for the next list; that of longer lists is given back."""
_MARK = secrets.token_hex(16)
"""Stands where the ids were; nobody who writes a body knows it."""
_OPENING = re.compile(rb"\s*:\s*\[")


class _Kept(threading.local):
    """A parser for each thread."""

    def __init__(self) -> None:
        self.parser = simdjson.Parser()


_kept = _Kept()


def cut_ids(body: bytes, field: str) -> tuple[bytes, TokenIds] | None:
    """A body without the ids of a field, and those; None where there are none, or they may be something else.

    JSON has an unescaped quote behind ``{`` or ``,`` only where a key or a text begins, so what is found is a key,
    though perhaps not of the outermost object: the reader has to see that ``put_back`` got to put them back.
    """
    name = b'"%b"' % field.encode()
    at = body.find(name) if len(body) >= _LONG_BYTES else -1
    opening = _OPENING.match(body, at + len(name)) if at >= 0 else None
    if opening is None or not body[:at].rstrip(b" \t\r\n").endswith((b"{", b",")):
        return None
    start, end = opening.end() - 1, body.find(b"]", opening.end()) + 1
    ids = _read(body[start:end])
    return None if ids is None else (b'%b"%b"%b' % (body[:start], _MARK.encode(), body[end:]), ids)


def put_back(given: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """For the field: the ids that were cut out, if they were, instead of what stands for them."""
    return info.context if given == _MARK and info.context is not None else handler(given)


def _read(numbers: bytes) -> TokenIds | None:
    """The ids of a JSON array; None unless it has some, and nothing but those."""
    parser = _kept.parser if len(numbers) <= _KEPT_BYTES else simdjson.Parser()
    try:
        wide = np.frombuffer(parser.parse(numbers).as_buffer(of_type="i"), np.uint64)  # type: ignore[union-attr]
    except (TypeError, ValueError, RuntimeError):
        # The last of them for numbers of more than 64 bits.
        return None
    # Negative ones count as the highest.
    is_sound = len(wide) and wide.max() < 2**31
    return TokenIds(wide.astype("<i4").tobytes()) if is_sound else None
