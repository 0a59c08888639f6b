"""HTTP connection of a client: refusals in the form of OpenAI's API, disconnects and server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from functools import partial
from typing import TypeVar

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.http.connection import BoundedHttpProtocol
from cluster.http.cycle import LEFT_KEY, Departure
from cluster.http.refusal import Refusal
from router.answer import Answer
from router.api_keys import KeyRing
from router.errors import ApiError, ClientLeftError, RequestFailedError

Got = TypeVar("Got")
Frames = AsyncGenerator[bytes, None]

_WAITING = b"\n"
"""Event without data, which clients skip. Some clients fail on a comment before the first event."""
WAITING_S = 10.0
"""Interval between empty events in a waiting stream; proxies close idle connections after 30 to 60 seconds."""


class RouterProtocol(BoundedHttpProtocol):
    """Connection of the router's client."""

    keys = KeyRing()
    """API keys, which tell clients with one address apart."""

    def client_of(self, scope: Scope) -> Hashable:
        """Return the address and the API key's name of a request; unknown keys count as none."""
        key = self.keys.find(given_key(scope)) if self.keys else None
        return super().client_of(scope), None if key is None else key.name

    def refused(self, refusal: Refusal) -> ASGIApp:
        """Return the application that answers a refused request."""
        return answer_of(ApiError(refusal.status, str(refusal), code=refusal.code))


async def unless_client_leaves(scope: Scope, work: Awaitable[Got]) -> Got:
    """Return the result of ``work``; raise ClientLeftError if the client leaves first."""
    departure: Departure = scope[LEFT_KEY]
    try:
        async with asyncio.timeout(None) as limit:
            departure.expect(partial(limit.reschedule, 0))
            return await work
    except TimeoutError:
        if limit.expired():
            raise ClientLeftError from None
        raise
    finally:
        departure.forget()


def answer_of(error: ApiError) -> Response:
    return Response(error.body, error.status, error.headers, media_type="application/json")


class JsonAnswer(Response):
    """JSON response that encodes its headers faster than Starlette does; their names must be lowercase."""

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Override Starlette's method, which the constructor calls."""
        given = [] if headers is None else headers.items()
        self.raw_headers = [(name.encode(), value.encode("latin-1")) for name, value in given]
        self.raw_headers += [(b"content-length", b"%d" % len(self.body)), (b"content-type", b"application/json")]


class EventStream(Response):
    """Response of server-sent events. The status is held back so that an error before the first event can set it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        opening: AbstractAsyncContextManager[Answer],
        frames: Callable[[Answer], Frames],
        failed: Callable[[RequestFailedError], bytes],
    ) -> None:
        """Stream the frames of an answer; ``failed`` returns the last frame if the stream fails after its first one."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._opening = opening
        self._frames = frames
        self._failed = failed
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until it ends or fails, or the client leaves."""
        del receive
        with suppress(ClientLeftError):
            await unless_client_leaves(scope, self._write(send))

    async def _write(self, send: Send) -> None:
        try:
            async with self._opening as answer, aclosing(self._frames(answer)) as frames:
                await self._send_first(send, answer, frames)
                async for frame in frames:
                    await self._send(send, frame)
        except RequestFailedError as error:
            if not self._started:
                raise
            await self._send(send, self._failed(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_first(self, send: Send, answer: Answer, frames: Frames) -> None:
        """Write the first frame, and empty events until it is available."""
        first = asyncio.ensure_future(anext(frames))
        try:
            is_there = False
            while not is_there:
                is_there = bool((await asyncio.wait([first], timeout=WAITING_S))[0])
                frame = first.result() if is_there else _WAITING
                if not self._started:
                    self.headers.update(answer.headers)
                await self._send(send, frame)
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    async def _send(self, send: Send, frame: bytes) -> None:
        if not self._started:
            self._started = True
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
        await send({"type": "http.response.body", "body": frame, "more_body": True})


def event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def given_key(scope: Scope) -> bytes:
    """Return the bearer token of a request; empty if it has none."""
    given = next((value for name, value in scope.get("headers", ()) if name == b"authorization"), b"")
    scheme, _, key = given.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
