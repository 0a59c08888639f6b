"""The router's complete HTTP interface, from raw bytes on: uvicorn's parser and our application, without a socket.

Replicas answer only administrative commands. Accepted requests end when their client disconnects, which every client
does.
"""

import asyncio
import atexit
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from cluster.channel import AsyncInbox, Outbox
from cluster.grammar import Grammars
from cluster.spec.messages import Command, CommandResult, Message
from router.admission import read_keys
from router.app import create_app
from router.connection import HttpProtocol
from router.preprocess.job import Job, JsonText, Preprocessed
from router.preprocess.model import ServedModel
from router.preprocess.pool import PreprocessPool
from router.preprocess.preprocessor import preprocess
from tests.fakes.bootstrap import FakeTable, entry_of, peer_of, table_of
from tests.fakes.model_folder import write_model_folder
from tests.fakes.router_cluster import config_of, make_server
from tests.fuzz.mutate import Codec

ANSWER_S = 0.02
"""Time until a refused request has its answer."""
END_S = 10.0
"""Longest time that a request may continue after its client has disconnected."""
ADMIN = "admin-key"
PEERS = (peer_of("prefill-0"), peer_of("decode-0"))
_END = b"\r\n\r\n"


class _SilentInbox(AsyncInbox):
    """Inbox without a socket, which receives nothing."""

    address = "tcp://nowhere:1"

    def __init__(self) -> None:
        pass

    @property
    def dropped(self) -> Counter[str]:
        return Counter()


class _LosingOutbox(Outbox):
    """Outbox without sockets, which loses all messages except commands."""

    def __init__(self) -> None:
        self.on_taken: Callable[[CommandResult], None] | None = None

    def send(self, address: str, message: Message) -> None:
        """Lose a message, or accept a command in the replica's place."""
        if isinstance(message, Command) and self.on_taken is not None:
            (peer,) = (peer for peer in PEERS if peer.address == address)
            taken = CommandResult(number=message.number, replica=peer.replica, incarnation=peer.incarnation)
            asyncio.get_running_loop().call_soon(self.on_taken, taken)

    def broadcast(self, addresses: Iterable[str], message: Message) -> None: ...

    def forget(self, address: str) -> None: ...


class _Wire(asyncio.Transport):
    """Transport that records what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = bytearray()
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self._is_closing = True

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


class _Inline:
    """Preprocesses every body in this process, where an error is seen."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def run(self, job: Job, *_: object) -> Preprocessed | JsonText:
        return preprocess(self._model, job)


class HttpSurface:
    """Router without sockets, in its own event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._state = ServerState()
        self._loop.run_until_complete(self._build())

    def feed(self, data: bytes) -> None:
        """Send a client's bytes and disconnect. Raise AssertionError for status 500 or an endless answer."""
        self._loop.run_until_complete(self._feed(data))

    def close(self) -> None:
        """Stop threads and event loop."""
        self._grammars.close()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _build(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            server = make_server(write_model_folder(Path(folder)), FakeTable())
            outbox = _LosingOutbox()
            service = server.service(_SilentInbox(), outbox)
            grammars = self._grammars = Grammars(Path(folder), service.model.tokenizer.vocab_size)
        inline = cast("PreprocessPool", _Inline(replace(service.model, grammars=grammars)))
        service = replace(service, preprocess=inline, keys=read_keys(config_of().router, {"BATON_ADMIN_KEY": ADMIN}))
        service.relay.on_table(table_of(*map(entry_of, PEERS)))
        outbox.on_taken = service.relay.commands.on_result
        self._service = service
        self._config = uvicorn.Config(create_app(service), lifespan="off", log_config=None, log_level="critical")
        self._config.load()

    async def _feed(self, data: bytes) -> None:
        wire = _Wire()
        protocol = HttpProtocol(self._config, self._state, {}, asyncio.get_running_loop())
        protocol.connection_made(wire)
        protocol.data_received(data)
        await self._settle(ANSWER_S)
        protocol.connection_lost(None)
        self._service.relay.set_paused(False)  # a command may have paused it
        await self._settle(END_S)
        assert not self._state.tasks, "a request goes on without its client"
        for answer in bytes(wire.written).split(b"HTTP/1.1 ")[1:]:
            assert not answer.startswith(b"500"), answer

    async def _settle(self, timeout_s: float) -> None:
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=timeout_s)


@cache
def surface() -> HttpSurface:
    """Return the only instance in this process."""
    made = HttpSurface()
    atexit.register(made.close)
    return made


def _read(data: bytes) -> dict[str, Any]:
    head, _, body = data.partition(_END)
    line, *headers = head.decode().split("\r\n")
    return {"line": line.split(" "), "headers": [header.split(": ", 1) for header in headers], "body": _body(body)}


def _body(body: bytes) -> Any:
    return json.loads(body) if body else None


def _write(tree: Any) -> bytes:
    body = b"" if tree.get("body") is None else json.dumps(tree["body"]).encode()
    headers = [f"{header[0]}: {header[1]}" for header in tree["headers"] if header[0].lower() != "content-length"]
    head = [" ".join(str(word) for word in tree["line"]), *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join(head).encode() + _END + body


def _changed_tree_is_written(tree: Any) -> bytes:
    """Return an input that writes a changed tree, or nothing if no request is left."""
    try:
        return _write(tree)
    except (AttributeError, KeyError, IndexError) as error:
        raise ValueError("no request") from error


HTTP = Codec(_read, _changed_tree_is_written)


def requests() -> list[bytes]:
    """Return valid requests to many routes."""
    client = [["Host", "router"], ["Content-Type", "application/json"]]
    admin = [*client, ["Authorization", f"Bearer {ADMIN}"]]
    chat = {"model": "echo", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    posts: list[tuple[str, list[list[str]], Any]] = [
        ("/v1/completions", client, {"model": "echo", "prompt": ["a", "b"], "max_tokens": 3, "n": 2, "logprobs": 1}),
        (
            "/v1/completions",
            [*client, ["X-data-parallel-rank", "0"]],
            {"model": "echo", "prompt": [1, 2], "stream": True},
        ),
        ("/v1/chat/completions", [*client, ["traceparent", f"00-{'a' * 32}-{'b' * 16}-01"]], chat),
        ("/v1/chat/completions", client, {**chat, "tools": tools, "tool_choice": "auto"}),
        ("/v1/responses", client, {"model": "echo", "input": "hello", "reasoning": {"effort": "low"}}),
        ("/tokenize", client, {"model": "echo", "prompt": "hello"}),
        ("/detokenize", client, {"model": "echo", "tokens": [1, 2]}),
        ("/admin/drain", admin, {"replica": "decode-0"}),
        ("/admin/flush_cache", admin, {}),
    ]
    gets = [("/metrics", client), ("/v1/models", client), ("/cluster", client), ("/admin/load", admin)]
    return [
        *(_write({"line": ["POST", path, "HTTP/1.1"], "headers": head, "body": body}) for path, head, body in posts),
        *(_write({"line": ["GET", path, "HTTP/1.1"], "headers": head}) for path, head in gets),
    ]
