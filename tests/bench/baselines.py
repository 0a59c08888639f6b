"""HTTP servers to compare the router with, each for a process of its own: an empty FastAPI app, and no app at all."""

import asyncio
import re
import threading
import time
from concurrent.futures import Future
from typing import Any, cast

import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse

from cluster.processes import freeze_loaded_objects

_HOST = "127.0.0.1"
_ANSWER = {
    "id": f"cmpl-{'0' * 32}",
    "object": "text_completion",
    "created": 1_700_000_000,
    "model": "mock",
    "choices": [{"index": 0, "text": "Address", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
    "usage": {
        "prompt_tokens": 8192,
        "completion_tokens": 1,
        "total_tokens": 8193,
        "prompt_tokens_details": {"cached_tokens": 0},
    },
}
"""Answer of the same form and size as the router's."""
_CONTENT = bytes(JSONResponse(_ANSWER).body)
_WHOLE_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(_CONTENT), _CONTENT)
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)


class EmptyFastApi:
    """FastAPI app that reads JSON bodies and answers a constant, served as users do: uvloop and httptools."""

    def __init__(self) -> None:
        app = FastAPI()

        @app.post("/v1/completions")
        async def completions(request: Request) -> JSONResponse:
            await request.json()
            return JSONResponse(_ANSWER)

        config = uvicorn.Config(app, _HOST, 0, loop="uvloop", http="httptools", access_log=False, log_level="warning")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, name="fastapi")

    def start(self) -> str:
        """Start serving. Return the base URL."""
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        freeze_loaded_objects()  # as in the router, though few users know of it
        return f"http://{_HOST}:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def cpu_s(self) -> float:
        """Return this process's CPU time so far."""
        return time.process_time()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


class Answerer:
    """Server that answers every request at once: the share of clients, sockets and the machine in a latency."""

    def __init__(self) -> None:
        self._running: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()), name="answerer")

    def start(self) -> str:
        """Start serving. Return the base URL."""
        self._thread.start()
        return self._running.result()[0]

    def close(self) -> None:
        _, loop, stopped = self._running.result()
        loop.call_soon_threadsafe(stopped.set)
        self._thread.join()

    async def _serve(self) -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        server = await loop.create_server(_Connection, _HOST, 0)
        self._running.set_result((f"http://{_HOST}:{server.sockets[0].getsockname()[1]}", loop, stopped))
        await stopped.wait()
        server.close()


class _Connection(asyncio.Protocol):
    """Connection with one request at a time, whose head arrives in one piece."""

    _num_missing = 0
    """Number of bytes of the request that have not arrived."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._num_missing:
            head, _, data = data.partition(b"\r\n\r\n")
            self._num_missing = int(cast(Any, _LENGTH.search(head))[1])
        self._num_missing -= len(data)
        if not self._num_missing:
            self._transport.write(_WHOLE_ANSWER)
