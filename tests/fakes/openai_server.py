"""Endpoint that answers immediately: a completion repeats "x " `max_tokens` times, a chat repeats the last message."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REFUSED = "refuse this"
"""Chat message that is answered with HTTP 503, like a prompt of `REFUSED_LEN` tokens."""
REFUSED_LEN = 10
PAGE_SIZE = 64
TRACE_PATH = "/traces/1"
CUT = "cut this"
"""Chat message whose stream ends with an error event after the first chunk."""

ODD = "odd event"
"""Chat message whose stream has an event with a choice, but no delta."""
THINK = "think first"
"""Chat message whose answer begins with reasoning."""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == TRACE_PATH:
            self._send(200, '{"traceEvents": []}')
        else:
            self._send(200, json.dumps({"object": "list", "data": [{"id": "fake", "object": "model"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        assert isinstance(server, FakeServer)
        server.bodies.append(body)
        if self.path == "/tokenize":
            self._send(200, json.dumps({"count": len(body["prompt"].split())}))
            return
        text = body["messages"][-1]["content"] if "messages" in body else ""
        if text == REFUSED or len(body.get("prompt", [])) == REFUSED_LEN:
            self._send(503, json.dumps({"error": {"message": "nothing is ready"}}))
        else:
            trace = {"x-baton-trace": TRACE_PATH} if body.get("trace") and server.makes_traces else {}
            self._send(200, "".join(_stream(body, text, server.count_cached(body))), trace)

    def log_message(self, *_: Any) -> None: ...

    def _send(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())


class FakeServer(ThreadingHTTPServer):
    """Server on a free port of this machine."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.makes_traces = True
        self._pages: set[tuple[int, ...]] = set()

    def count_cached(self, body: Mapping[str, Any]) -> int:
        """Return the length in tokens of the prompt's longest cached prefix of whole pages."""
        prompt = body.get("prompt", [])
        starts = [tuple(prompt[:end]) for end in range(PAGE_SIZE, len(prompt) + 1, PAGE_SIZE)]
        cached = max((len(start) for start in starts if start in self._pages and len(start) < len(prompt)), default=0)
        self._pages.update(starts)
        return cached


def _stream(body: dict[str, Any], text: str, num_cached: int) -> Iterator[str]:
    yield ": waiting\n\n"
    if text == THINK:
        yield _event({"choices": [{"delta": {"reasoning": "hm ", "reasoning_content": "hm "}, "index": 0}]})
    if text == ODD:
        yield _event({"choices": [{"index": 0, "finish_reason": "stop"}]})
    pieces = text.split(" ") if "messages" in body else ["x"] * body["max_tokens"]
    for index, piece in enumerate(pieces):
        if text == CUT and index:
            yield _event({"error": {"message": "the replica is gone"}})
            return
        choice = {"delta": {"content": piece + " "}} if "messages" in body else {"text": piece + " "}
        yield _event({"choices": [choice | {"index": 0, "finish_reason": None}]})
    last: dict[str, object] = {"delta": {}} if "messages" in body else {"text": ""}
    yield _event({"choices": [last | {"index": 0, "finish_reason": "length"}]})
    if body.get("stream_options"):
        usage = {
            "prompt_tokens": len(body.get("prompt", [])),
            "completion_tokens": len(pieces),
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }
        yield _event({"choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def _event(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event)}\n\n"


@contextmanager
def serve() -> Iterator[FakeServer]:
    """Run a fake endpoint on a free port. Its ``url`` and the received ``bodies`` can be read."""
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
