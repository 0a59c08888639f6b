"""Raw connections to both HTTP services: what a client without a key can cost, and how it is refused."""

import asyncio
import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from cluster.bootstrap import service
from cluster.bootstrap.service import MAX_BODY_BYTES, BootstrapServer
from cluster.http import crowd as http_crowd
from cluster.http.connection import MAX_PIPELINED, BoundedHttpProtocol
from router import connection, relay
from router.api import status as status_routes
from router.preprocess.model import MIN_BODY_BYTES
from tests.fakes.model_folder import write_model_folder
from tests.fakes.router_cluster import CONTEXT, MODEL, run_cluster
from tests.fakes.waits import wait_until

pytestmark = pytest.mark.integration

TOKEN = "token"
WAIT_S = 60.0
PIECE = b"x" * (1 << 20)


@dataclass
class Service:
    """One of the services; ``reading`` is the head of a request whose body it reads."""

    url: str
    reading: str
    max_body_bytes: int
    protocol: type[BoundedHttpProtocol]
    most_bytes: int = 0
    """Largest resident memory of this process while a client sent."""

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=WAIT_S)

    def ask(self, data: bytes, num_more: int = 0) -> tuple[int, dict[str, str], bytes]:
        """Send bytes and up to ``num_more`` MiB; return status, headers and body of the response once closed."""
        with self.connect() as sock:
            sock.sendall(data)
            try:
                for _ in range(num_more):
                    sock.sendall(PIECE)
                    self.most_bytes = max(self.most_bytes, resident_bytes())
            except OSError:
                pass
            head, _, body = b"".join(_received(sock)).partition(b"\r\n\r\n")
        line, *headers = head.decode().split("\r\n")
        return int(line.split(" ")[1]), dict(header.split(": ", 1) for header in headers), body

    def is_well(self) -> bool:
        return self.ask(b"GET /health HTTP/1.0\r\n\r\n")[0] == 200


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _received(sock: socket.socket) -> Iterator[bytes]:
    try:
        while data := sock.recv(1 << 16):
            yield data
    except ConnectionResetError:
        pass


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    for cluster in run_cluster(write_model_folder(tmp_path_factory.mktemp("model"))):
        yield Service(cluster.url, "POST /v1/completions", MIN_BODY_BYTES + 16 * CONTEXT, connection.RouterProtocol)


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[Service]:
    server = BootstrapServer("127.0.0.1", 0, TOKEN)
    yield Service(server.start(), "PUT /ranks", MAX_BODY_BYTES, service.BootstrapProtocol)
    server.stop()


@pytest.fixture(params=["router", "bootstrap"])
def served(request: pytest.FixtureRequest) -> Service:
    found: Service = request.getfixturevalue(request.param)
    return found


def head(line: str, *headers: str) -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", f"authorization: Bearer {TOKEN}", *headers, "", ""]).encode()


def error_of(body: bytes) -> Any:
    return json.loads(body)["error"]


@pytest.mark.parametrize(
    "data", [b"GET /health HTTP/1.1\r\na: ", head("POST /x", "transfer-encoding: chunked") + b"0;"]
)
def test_an_endless_head_takes_no_memory(served: Service, data: bytes) -> None:
    assert served.is_well()
    before = served.most_bytes = resident_bytes()
    status, headers, body = served.ask(data, num_more=131)
    assert served.most_bytes - before < 5 << 20
    assert (status, headers["connection"]) == (431 if b"GET" in data else 404, "close")
    if status == 431:
        assert error_of(body)["code"] == "head_too_large"
        assert error_of(body)["message"] == "the request head is larger than 65536 bytes"
    assert served.is_well()


def test_a_declared_body_above_the_limit_is_refused_unread(served: Service) -> None:
    size = f"content-length: {served.max_body_bytes + 1}"
    status, headers, body = served.ask(head(served.reading, size, "expect: 100-continue"))
    assert (status, headers["connection"]) == (413, "close")
    assert error_of(body)["message"] == f"the body is larger than {served.max_body_bytes} bytes"


@pytest.mark.parametrize("length", ["content-length: 40000000", "transfer-encoding: chunked"])
def test_a_refused_client_reads_why_after_sending_its_body(served: Service, length: str) -> None:
    status, headers, body = served.ask(head("POST /nowhere", length) + b"2000000\r\n", num_more=32)
    assert (status, headers["connection"]) == (404, "close")
    assert error_of(body)["code"] == "not_found"


def test_an_absent_body_times_out(served: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.protocol, "body_s", 0.2)
    status, headers, body = served.ask(head(served.reading, "content-length: 5") + b"{")
    assert (status, headers["connection"]) == (408, "close")
    assert error_of(body)["message"] == "the request body did not arrive within 0.2 s"


def test_an_invalid_request_is_refused(served: Service) -> None:
    status, _, body = served.ask(head("GET /health", "content-length: 1", "content-length: 2"))
    assert (status, error_of(body)["code"]) == (400, "bad_request")


def test_a_compressed_body_is_refused(router: Service) -> None:
    status, _, body = router.ask(
        head(router.reading, "content-length: 1", "content-encoding: gzip", "connection: close") + b"{"
    )
    assert (status, error_of(body)["message"]) == (415, "content-encoding: got 'gzip'; allowed: none")


@pytest.mark.parametrize("path", ["/traces/", "/nowhere/"])
def test_a_long_path_is_not_repeated(router: Service, path: str) -> None:
    status, _, body = router.ask(head(f"GET {path}{'x' * 60_000}", "connection: close"))
    assert (status, len(body) < 300) == (404, True)


def test_head_is_answered_where_get_is(served: Service) -> None:
    with served.connect() as sock:
        sock.sendall(b"HEAD /health HTTP/1.0\r\n\r\n")
        said = b"".join(_received(sock))
    assert said.startswith(b"HTTP/1.1 200 OK\r\n")
    assert said.endswith(b"\r\n\r\n")


def small_window(router: Service) -> socket.socket:
    """Return a connection to which the router can send little at once."""
    host, port = router.url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    sock.settimeout(WAIT_S)
    sock.connect((host, int(port)))
    return sock


def large_answer() -> bytes:
    """Return a request whose answer no buffer of the kernel holds."""
    body = json.dumps({"model": MODEL, "tokens": [5] * 1_300_000}).encode()
    return head("POST /detokenize", f"content-length: {len(body)}", "connection: close") + body


def test_a_client_that_does_not_read_is_disconnected(router: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_window(router) as sock:
        sock.sendall(large_answer())
        everything = b"".join(_received(sock))
    assert everything.startswith(b"HTTP/1.1 200 OK")
    monkeypatch.setattr(router.protocol, "read_s", 0.3)
    with small_window(router) as sock:
        sock.sendall(large_answer())
        time.sleep(3.0)
        assert len(b"".join(_received(sock))) < len(everything)
    assert router.is_well()


def limit_sent_bytes(protocol: type[BoundedHttpProtocol], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel take few bytes per connection. By default, it takes as many as earlier connections sent fast."""
    made = protocol.connection_made

    def connection_made(self: BoundedHttpProtocol, transport: asyncio.BaseTransport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        made(self, transport)

    monkeypatch.setattr(protocol, "connection_made", connection_made)


@pytest.mark.parametrize("header", ["connection: close", "a: b"])
def test_a_client_that_never_reads_the_end_is_disconnected(
    router: Service, monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    """The kernel takes a part of the response; what it leaves is too little to pause the application."""
    monkeypatch.setattr(router.protocol, "read_s", 0.3)
    limit_sent_bytes(router.protocol, monkeypatch)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        host, port = router.url.removeprefix("http://").split(":")
        sock.connect((host, int(port)))
        sock.sendall(head("GET /openapi.json", header))
        time.sleep(2.0)
        sock.settimeout(WAIT_S)
        num_read = 0
        with suppress(ConnectionResetError):
            while data := sock.recv(1 << 16):
                num_read += len(data)
    assert num_read < len(router.ask(head("GET /openapi.json", "connection: close"))[2])


def test_a_client_that_reads_slowly_gets_everything(router: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.protocol, "read_s", 0.3)
    num_read, tail = 0, b""
    with small_window(router) as sock:
        sock.sendall(large_answer())
        begin_s = time.monotonic()
        while data := sock.recv(1 << 16):
            num_read, tail = num_read + len(data), data
            time.sleep(0.002)
    assert num_read > 3 << 20
    assert tail.endswith(b'"}')
    assert time.monotonic() - begin_s > 2 * router.protocol.read_s


@pytest.mark.parametrize("num_headers", [128, 129])
def test_a_request_has_at_most_128_headers(served: Service, num_headers: int) -> None:
    own = ["connection: close", *["a:b"] * (num_headers - 2)]  # and the key
    status, _, body = served.ask(head("GET /health", *own))
    assert status == (200 if num_headers == 128 else 431)
    if status == 431:
        assert error_of(body)["message"] == "the request has more than 128 headers"


def test_packets_that_wait_for_their_turns_are_read_in_order(served: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading never takes less time than a pass of the event loop may spend on it."""
    monkeypatch.setattr(http_crowd, "MAX_READ_S", 1e-9)
    request = head("GET /health")
    socks = [served.connect() for _ in range(20)]
    try:
        for begin in range(0, len(request) * 3, 7):
            for sock in socks:
                sock.sendall((request * 3)[begin : begin + 7])
        for sock in socks:
            sock.sendall(b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n")
        assert all(b"".join(_received(sock)).count(b"HTTP/1.1 200 OK") == 4 for sock in socks)
    finally:
        for sock in socks:
            sock.close()


def test_a_crowd_of_requests_delays_no_other_work(router: Service) -> None:
    """Every connection asks for what takes milliseconds, all at the same time."""
    socks = [router.connect() for _ in range(200)]
    try:
        for sock in socks:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nconnection: close\r\n\r\n")
        assert all(b"".join(_received(sock)).startswith(b"HTTP/1.1 200 OK") for sock in socks)
    finally:
        for sock in socks:
            sock.close()
    assert router.is_well()


def test_waiting_requests_for_metrics_share_one_text(router: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text is newer than all the requests that it answers."""
    made: list[float] = []

    def make(_: CollectorRegistry) -> bytes:
        made.append(time.monotonic())
        time.sleep(0.05)
        return b"%d" % len(made)

    monkeypatch.setattr(status_routes, "generate_latest", make)
    for number in (1, 2):
        sent_s = time.monotonic()
        with router.connect() as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * MAX_PIPELINED + b"GET /metrics HTTP/1.0\r\n\r\n")
            answers = b"".join(_received(sock))
        assert answers.count(b"200 OK") == MAX_PIPELINED + 1
        assert answers.endswith(b"%d" % len(made))
        assert len(made) <= 2 * number
        assert made[-1] > sent_s


def test_unread_log_probabilities_end_the_request(router: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_UNREAD_LOGPROBS", 5000)
    fields = {"prompt": "a", "max_tokens": CONTEXT - 2, "ignore_eos": True, "logprobs": 20, "stream": True, "n": 16}
    body = json.dumps({"model": MODEL, **fields}).encode()
    with small_window(router) as sock:
        sock.sendall(head("POST /v1/completions", f"content-length: {len(body)}", "connection: close") + body)
        wait_until(lambda: json.loads(router.ask(b"GET /load HTTP/1.0\r\n\r\n")[2]) == {"server_load": 0})
        said = b"".join(_received(sock))
    assert b'"code":"unread"' in said[-2000:]
    assert b"[DONE]" not in said[-2000:]
    assert router.is_well()
