"""Receives bodies of requests: each whole, in time, and all that are still arriving in bounded memory."""

import asyncio
from http import HTTPStatus

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from router.api.errors import ApiError

_MOST_LARGEST = 8
"""Bodies of the largest size that may be arriving at the same time."""
_CLOSE = {"connection": "close"}
"""Nothing more is awaited of who is too slow, or of whom there is no memory for."""


class ArrivingBodies:
    """Of one router process; most come with their head and are not seen here."""

    def __init__(self, limit: int, timeout_s: float) -> None:
        """``limit`` of one body in bytes, ``timeout_s`` from its first bytes to its last."""
        self._limit, self._timeout_s = limit, timeout_s
        self._num_bytes = 0

    async def receive(self, request: Request) -> bytes:
        """The whole body.

        Raises:
            ApiError: 413 when it is too large, 408 when it comes too slowly, 503 when others take the memory.
            ClientDisconnect: it did not come whole.
        """
        first = await request.receive()
        body = self._checked(_body_of(first), 0)
        return await self._receive_rest(request, body) if first.get("more_body", False) else body

    async def _receive_rest(self, request: Request, first: bytes) -> bytes:
        parts, num_bytes = [first], len(first)
        self._num_bytes += num_bytes
        try:
            async with asyncio.timeout(self._timeout_s):
                has_more = True
                while has_more:
                    event = await request.receive()
                    part = self._checked(_body_of(event), num_bytes)
                    num_bytes += len(part)
                    self._num_bytes += len(part)
                    self._check_all()
                    parts.append(part)
                    has_more = event.get("more_body", False)
        except TimeoutError:
            message = f"the body did not come whole within {self._timeout_s:g} s (router.body_timeout_s)"
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="body_timeout", headers=_CLOSE) from None
        finally:
            self._num_bytes -= num_bytes
        return b"".join(parts)

    def _checked(self, part: bytes, num_before: int) -> bytes:
        if num_before + len(part) > self._limit:
            message = f"the body is larger than {self._limit} bytes (router.max_body_mib)"
            raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")
        return part

    def _check_all(self) -> None:
        most = _MOST_LARGEST * self._limit
        if self._num_bytes > most:
            message = f"bodies that are arriving at the same time take more than {most} bytes; try again"
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE, message, code="bodies_too_large", headers=_CLOSE | {"retry-after": "1"}
            )


def _body_of(event: Message) -> bytes:
    if event["type"] == "http.disconnect":
        raise ClientDisconnect
    body: bytes = event.get("body", b"")
    return body
