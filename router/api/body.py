"""Receives the bodies of requests and reads each into its schema, or says what is wrong with it.

The token ids of a long body are taken out before pydantic reads it, which would make a Python number of each. Anything
that is not certainly a list of integers is left to pydantic, which reports what is wrong.
"""

import asyncio
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, ClassVar, TypeVar

import numpy as np
import simdjson
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, ValidatorFunctionWrapHandler
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from cluster.spec.wire import TokenIds
from router.api import constraint_fields
from router.api.unsupported import refuse_unsupported
from router.errors import ApiError, bad_request

EXPECTED = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of such lists; no list may be empty",
    "stop": "a string, or a list of at most 16 strings; none of them empty",
    "input": "a string, or a list of messages, function calls, their outputs, and reasoning",
    "content": "a string, or a list of parts of type text or refusal; images, audio and files are not supported",
} | constraint_fields.EXPECTED
"""The fields that may have several types, in words."""
_LONG_BYTES = 2048
"""Pydantic is as fast on shorter bodies."""
_PLACEHOLDER = secrets.token_hex(16)
"""Replaces the ids; unknown to the authors of bodies."""
_OPENING = re.compile(rb"\s*:\s*\[")
_WORDS = {
    "extra_forbidden": "there is no such field",
    "too_short": "items needed: at least {min_length}",
    "too_long": "items allowed: at most {max_length}",
}
"""Our words for pydantic's, by its type of error."""

TIMEOUT_S = 60.0
"""Longest time from the first byte of a body to its last. 64 MiB take six seconds at 100 Mbit/s."""
_MOST_LARGEST = 8
"""Bodies of the largest size that may be arriving at the same time."""
_CLOSE = {"connection": "close"}
"""Nothing more is awaited from a client that is too slow, or that there is no memory for."""


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())
    ids_field: ClassVar[str | None] = None
    """The field that may have thousands of token ids; its validator is ``put_back``."""
    expected: ClassVar[Mapping[str, str]] = EXPECTED

    @property
    def others(self) -> dict[str, Any]:
        return self.model_extra or {}


Read = TypeVar("Read", bound=Body)


class ArrivingBodies:
    """Receives each body as a whole and in time, all of one process in bounded memory."""

    def __init__(self, limit: int) -> None:
        """Refuse bodies of more than ``limit`` bytes."""
        self._limit = limit
        self._num_bytes = 0

    async def receive(self, request: Request) -> bytes:
        """Return the whole body; most come with the head of their request.

        Raises:
            ApiError: 413 for a body that is too large, 408 for a slow one, 503 when others take the memory.
            ClientDisconnect: the body did not come to its end.
        """
        first = await request.receive()
        body = self._checked(_body_of(first), 0)
        return await self._receive_rest(request, body) if first.get("more_body", False) else body

    async def _receive_rest(self, request: Request, first: bytes) -> bytes:
        parts, num_bytes = [first], len(first)
        self._num_bytes += num_bytes
        try:
            async with asyncio.timeout(TIMEOUT_S):
                has_more = True
                while has_more:
                    event = await request.receive()
                    part = self._checked(_body_of(event), num_bytes)
                    num_bytes += len(part)
                    self._num_bytes += len(part)
                    if self._num_bytes > _MOST_LARGEST * self._limit:
                        raise self._no_memory()
                    parts.append(part)
                    has_more = event.get("more_body", False)
        except TimeoutError:
            message = f"the body did not arrive within {TIMEOUT_S:g} s"
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="body_timeout", headers=_CLOSE) from None
        finally:
            self._num_bytes -= num_bytes
        return b"".join(parts)

    def _checked(self, part: bytes, num_before: int) -> bytes:
        if num_before + len(part) > self._limit:
            message = f"the body is larger than {self._limit} bytes (router.max_body_mib)"
            raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")
        return part

    def _no_memory(self) -> ApiError:
        message = f"arriving bodies take more than {_MOST_LARGEST * self._limit} bytes together; try again"
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="bodies_too_large", headers=_CLOSE)


async def read(request: Request, schema: type[Read]) -> Read:
    """Receive and read the body of a request.

    Raises:
        ApiError: 400 naming the first wrong field, or as ``ArrivingBodies.receive``.
        ClientDisconnect: the body did not come to its end.
    """
    return parse(await request.app.state.bodies.receive(request), schema)


def parse(content: bytes, schema: type[Read]) -> Read:
    if (body := _read_cut(content, schema)) is not None:
        return body
    try:
        return schema.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "missing" and len(first["loc"]) == 1:
            # Another server may have another name for it.
            refuse_unsupported(
                {name: value for name, value in first["input"].items() if name not in schema.model_fields}
            )
        raise problem_of(first, schema.expected) from None


def _read_cut(content: bytes, schema: type[Read]) -> Read | None:
    """Read a valid body with a long list of token ids without making a number of each; None for any other."""
    field = schema.ids_field
    if field is None or (cut := cut_ids(content, field)) is None:
        return None
    rest, ids = cut
    with suppress(ValidationError):
        body = schema.model_validate_json(rest, context=ids)
        return body if getattr(body, field) is ids else None
    return None


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
    ids = _ids_in(body[start:end])
    return None if ids is None else (b'%b"%b"%b' % (body[:start], _PLACEHOLDER.encode(), body[end:]), ids)


def put_back(given: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """Validate the field: replace the placeholder by the ids that were cut out."""
    return info.context if given == _PLACEHOLDER and info.context is not None else handler(given)


def _ids_in(numbers: bytes) -> TokenIds | None:
    """Return the ids of a JSON array; None if it is empty or holds anything else."""
    try:
        wide = np.frombuffer(simdjson.Parser().parse(numbers).as_buffer(of_type="i"), np.uint64)  # type: ignore[union-attr]
    except (TypeError, ValueError, RuntimeError):
        # RuntimeError for numbers of more than 64 bits.
        return None
    # Read as unsigned, negative ones are the highest.
    is_sound = len(wide) and wide.max() < 2**31
    return TokenIds(wide.astype("<i4").tobytes()) if is_sound else None


def problem_of(error: ErrorDetails, expected: Mapping[str, str] = EXPECTED) -> ApiError:
    """Return a validation error in our words, naming the field."""
    if error["type"] == "json_invalid":
        return bad_request(f"body: {error['msg']}")
    path, field = _path(error["loc"], expected)
    if not path:
        return bad_request(f"body: must be a JSON object, got {_short(error['input'])}")
    if error["type"] == "missing":
        return bad_request(f"{path}: field required", path)
    if field in expected:
        return bad_request(f"{path}: must be {expected[field]}", path)
    words = _WORDS.get(error["type"])
    said = error["msg"] if words is None else words.format(**error.get("ctx", {}))
    return bad_request(f"{path}: {said}, got {_short(error['input'])}", path)


def _path(loc: tuple[int | str, ...], expected: Mapping[str, str]) -> tuple[str, str]:
    """Return the dotted path of a field, without the tags of unions, and its last name."""
    path, field = "", ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
            continue
        if step == "[key]":
            continue
        path += f".{step}" if path else step
        field = step
        if field in expected:
            break
    return path, field


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _body_of(event: Message) -> bytes:
    if event["type"] == "http.disconnect":
        raise ClientDisconnect
    body: bytes = event.get("body", b"")
    return body
