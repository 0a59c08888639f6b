"""The complete HTTP interface of both services, from raw bytes on: parser and application, without a socket.

Accepted requests end when their client disconnects, which every client does.
"""

import asyncio
import atexit
import json
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

import router.connection
from cluster.bootstrap import service as bootstrap
from cluster.bootstrap.table import BootstrapTable
from cluster.channel import AsyncInbox, Outbox
from cluster.grammar import Grammars
from cluster.http.connection import BoundedHttpProtocol
from cluster.spec.clock import SystemClock
from cluster.spec.messages import Command, CommandResult, Message
from router.api_keys import read_keys
from router.app import create_app
from router.preprocess.job import Job, JsonText, Preprocessed
from router.preprocess.model import ServedModel
from router.preprocess.pool import PreprocessPool
from router.preprocess.preprocessor import preprocess
from tests.fakes.bootstrap import FakeTable, entry_of, peer_of, table_of
from tests.fakes.model_folder import write_model_folder
from tests.fakes.router_cluster import config_of, make_server
from tests.fakes.wire import Wire
from tests.fuzz.mutate import Codec

ANSWER_S = 0.02
"""Time until a refused request has its answer."""
END_S = 10.0
"""Longest time that a request may continue after its client has disconnected."""
ADMIN = "admin-key"
TOKEN = "token"
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


class _Problems(logging.Handler):
    """Keeps the errors that a service or its event loop logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


class _Inline:
    """Preprocesses every body in this process, where an error is seen."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def run_inline(self, job: Job) -> Preprocessed | JsonText:
        return preprocess(self._model, job)


class HttpSurface:
    """Service without sockets, in its own event loop."""

    protocol: type[BoundedHttpProtocol]

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._state = ServerState()
        self._problems = _Problems()
        logging.getLogger("cluster.http.cycle").addHandler(self._problems)
        logging.getLogger("asyncio").addHandler(self._problems)
        self._config = uvicorn.Config(
            self._loop.run_until_complete(self._build()), lifespan="off", log_config=None, ws="none"
        )
        self._config.load()

    def feed(self, data: bytes) -> None:
        """Send a client's bytes and disconnect. Raise AssertionError for status 500 or an endless answer."""
        self._loop.run_until_complete(self._feed([data]))

    def feed_parts(self, data: bytes) -> None:
        """Like ``feed``, but split the bytes at random into packets."""
        rng = random.Random(data)
        cuts = sorted(rng.sample(range(len(data)), min(len(data), rng.choice([0, 1, 5, 50]))))
        self._loop.run_until_complete(self._feed([data[begin:end] for begin, end in pairwise([0, *cuts, len(data)])]))

    def close(self) -> None:
        """Stop threads and event loop."""
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _build(self) -> Any:
        """Return the service's application."""
        raise NotImplementedError

    def _after_client(self) -> None:
        """Restore what a client may have changed."""

    async def _feed(self, packets: list[bytes]) -> None:
        wire = Wire()
        protocol = self.protocol(self._config, self._state, {}, asyncio.get_running_loop())
        protocol.connection_made(wire)
        for packet in packets:
            protocol.data_received(packet)
        await self._settle(ANSWER_S)
        protocol.connection_lost(None)
        self._after_client()
        await self._settle(END_S)
        assert not self._state.tasks, "a request goes on without its client"
        assert not self._problems.found, self._problems.found
        for answer in wire.text.split("HTTP/1.1 ")[1:]:
            assert not answer.startswith("500"), answer

    async def _settle(self, timeout_s: float) -> None:
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=timeout_s)


class RouterSurface(HttpSurface):
    """Router whose replicas answer only administrative commands."""

    protocol = router.connection.RouterProtocol

    def close(self) -> None:
        self._grammars.close()
        super().close()

    async def _build(self) -> Any:
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
        return create_app(service)

    def _after_client(self) -> None:
        self._service.relay.set_paused(False)  # a command may have paused it


class BootstrapSurface(HttpSurface):
    """Bootstrap service with an empty table."""

    protocol = bootstrap.BootstrapProtocol

    async def _build(self) -> Any:
        app = bootstrap.create_app(BootstrapTable(lease_s=3.0), TOKEN, SystemClock())
        app.state.watched.close()  # nobody waits for a change
        return app


@cache
def surface(kind: type[HttpSurface] = RouterSurface) -> HttpSurface:
    """Return the only instance of a kind in this process."""
    made = kind()
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


def heads() -> list[bytes]:
    """Return connections whose heads and framing use the less common parts of HTTP."""
    read = f"authorization: Bearer {TOKEN}\r\n"
    chunks = '2;a=b\r\n{"\r\nA\r\n"x": 1234}\r\n0\r\nx-trailer: y\r\n\r\n'
    offer = f"POST /tokenize HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n{read}content-length: 2\r\n\r\n{{}}"
    texts = [
        f"PUT /ranks HTTP/1.1\r\nhost: x\r\n{read}transfer-encoding: chunked\r\n\r\n{chunks}",
        f"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n{chunks}{offer}",
        f"{offer}GET /health HTTP/1.1\r\n\r\nHEAD /health HTTP/1.1\r\nconnection: close\r\n\r\nGET",
        "CONNECT a:1 HTTP/1.1\r\n\r\n",
        f"\r\n\r\nGET /health?a=%00 HTTP/1.0\r\nconnection: keep-alive\r\na: {'b' * 70_000}\r\n\r\n",
        f"GET /{'a' * 70_000} HTTP/1.1\r\n" + "a: b\r\n" * 30,
        f"GET /watch?version=0&timeout_s=0 HTTP/1.1\r\n{read}content-length: 1\r\n\r\nxGET / HTTP/1.1\r\n\r\n",
        "POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 1\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        "POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\nx",
        "POST / HTTP/1.1\r\na: b\r\n c\r\nd: e\rf\r\n\r\n",
    ]
    return [text.encode() for text in texts]
