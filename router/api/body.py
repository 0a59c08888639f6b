"""Receives the bodies of requests and reads each into its schema, or says what is wrong with it."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from router.api import requests
from router.api.long_ids import cut_ids
from router.api.requests import EXPECTED
from router.api.unsupported import refuse_unsupported
from router.errors import ApiError, bad_request

Body = TypeVar("Body", bound=requests.Body)

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


async def read(request: Request, schema: type[Body]) -> Body:
    """Receive and read the body of a request.

    Raises:
        ApiError: 400 naming the first wrong field, or as ``ArrivingBodies.receive``.
        ClientDisconnect: the body did not come to its end.
    """
    return parse(await request.app.state.bodies.receive(request), schema)


def parse(content: bytes, schema: type[Body]) -> Body:
    """Read the bytes of a body."""
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


def _read_cut(content: bytes, schema: type[Body]) -> Body | None:
    """Read a valid body with a long list of token ids without making a number of each; None for any other."""
    field = schema.ids_field
    if field is None or (cut := cut_ids(content, field)) is None:
        return None
    rest, ids = cut
    with suppress(ValidationError):
        body = schema.model_validate_json(rest, context=ids)
        return body if getattr(body, field) is ids else None
    return None


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
