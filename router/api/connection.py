"""The client's end of one request: noticing that it left, and writing server-sent events to it."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cluster.spec.config import RouterConfig
from router.answer import Answer
from router.api.errors import failed
from router.errors import ClientLeftError, RequestFailedError

Got = TypeVar("Got")
Frames = AsyncGenerator[bytes, None]

_WAITING = b": waiting\n\n"


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, Got]) -> Got:
    """Do the work, whose request body was read before; stop it when the connection closes.

    Raises:
        ClientLeftError: the connection closed first.
    """
    tasks = asyncio.create_task(work), asyncio.create_task(_wait_gone(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientLeftError("client left")
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. The status is sent with the first event or comment, so that failures before it show."""

    media_type = "text/event-stream"

    def __init__(
        self,
        open_answer: Callable[[], AbstractAsyncContextManager[Answer]],
        frames: Callable[[Answer], Frames],
        config: RouterConfig,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._open_answer = open_answer
        self._frames = frames
        self._config = config
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the answer is whole, it fails, or the client leaves."""
        del scope
        try:
            await unless_client_leaves(receive, self._write(send))
        except ClientLeftError:
            return

    async def _write(self, send: Send) -> None:
        async with self._open_answer() as answer, aclosing(self._commented(self._frames(answer))) as frames:
            try:
                async for frame in frames:
                    if not self._started:
                        self.headers.update(answer.headers)
                    await self._send(send, frame)
            except RequestFailedError as error:
                if not self._started:
                    raise
                await self._send(send, event(failed(error).body))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _commented(self, frames: Frames) -> Frames:
        """The frames, with a comment after every so many seconds without the first one."""
        first = asyncio.ensure_future(anext(frames))
        try:
            while not (await asyncio.wait([first], timeout=self._config.sse_comment_s))[0]:
                yield _WAITING
            yield first.result()
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        async for frame in frames:
            yield frame

    async def _send(self, send: Send, frame: bytes) -> None:
        """Write one frame; a client that takes nothing for long is given up, with what is open for it."""
        try:
            async with asyncio.timeout(self._config.slow_reader_s):
                if not self._started:
                    self._started = True
                    await send(self._start())
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        except TimeoutError:
            raise ClientLeftError("the client takes nothing of its stream") from None

    def _start(self) -> Message:
        return {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % data


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
