"""Clients that leave, or wait too long, in each phase: nothing of them is left on either side, nor in the router."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from cluster.spec.config import DeployConfig, KvConfig, ModelConfig, PrefillConfig, RouterConfig
from cluster.spec.lifecycle import Role
from cluster.spec.transfer_messages import Done, Result
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.held_engine import HeldEngine
from tests.fakes.model_folder import write_model_folder

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PAGE_SIZE, PAGE_BYTES, NUM_PAGES = 16, 8192, 256
SHORT, LONG = 2 * PAGE_SIZE - 4, NUM_PAGES * PAGE_SIZE - 6
"""Prompts of two pages, which are two chunks, and of the whole pool."""
WAIT_S = 60.0
TIMEOUT_S = 3.0
"""Of requests that are to time out; each phase is reached before."""
LEAVE_S = 5.0
"""Longest time after which nothing may be left, on a machine with nothing else to do."""


class Endpoint:
    """A router over two held workers, and clients on sockets of their own."""

    def __init__(self, url: str, engine: HeldEngine, http: httpx.Client) -> None:
        self.engine = engine
        self.prefill, self.decode = (engine.leaders[role] for role in Role)
        self._host, self._port = url.removeprefix("http://").split(":")
        self._http = http
        self._num_asked = 0
        self._clients: list[socket.socket] = []

    def ask(self, prompt_len: int) -> socket.socket:
        """Every other client streams; no prompt begins like another."""
        self._num_asked += 1
        first = [1 + self._num_asked % 250, 1 + self._num_asked // 250]
        body = {"model": "m", "prompt": first + [7] * (prompt_len - 2), "ignore_eos": True}
        body |= {"max_tokens": 4, "stream": self._num_asked % 2 == 0}
        content = json.dumps(body).encode()
        client = socket.create_connection((self._host, int(self._port)))
        self._clients.append(client)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content))
        client.sendall(content)
        return client

    def hang_up(self) -> None:
        """No client is left."""
        while self._clients:
            self._clients.pop().close()

    def num_in_router(self) -> float:
        """Open and waiting requests."""
        lines = self._http.get("/metrics").text.splitlines()
        names = ("baton_num_requests_running", "baton_num_requests_waiting")
        return sum(float(line.split()[1]) for line in lines if line.split()[0] in names)

    def complete(self) -> None:
        """One whole answer."""
        with closing(self.ask(SHORT)) as client, client.makefile("rb") as reply:
            assert b" 200 " in reply.readline()

    def wait_until(self, is_so: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < deadline_s, (
                f"{what}: {self.engine.leftovers}, {self.num_in_router()} in the router"
            )
            time.sleep(0.01)


@contextmanager
def running(folder: Path, limits: RouterConfig) -> Iterator[Endpoint]:
    make_checkpoint(write_model_folder(folder), "llama")
    config = DeployConfig(
        model=ModelConfig(path=str(folder), served_name="m"),
        kv=KvConfig(page_size=PAGE_SIZE, memory_gib=(NUM_PAGES + 1) * PAGE_BYTES / 2**30),
        prefill=PrefillConfig(chunk_tokens=PAGE_SIZE),
        router=limits,
    )
    with HeldEngine(config, folder).running() as engine, engine.served(config, folder) as http:
        yield Endpoint(str(http.base_url).rstrip("/"), engine, http)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    # As many as one phase opens: whoever left does not count any more.
    with running(tmp_path_factory.mktemp("model"), RouterConfig(port=0, key_max_requests=101)) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def hasty_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """It gives requests up."""
    limits = RouterConfig(port=0, request_timeout_s=TIMEOUT_S, max_wait_s=TIMEOUT_S / 2)
    with running(tmp_path_factory.mktemp("model"), limits) as endpoint:
        yield endpoint


def queue(endpoint: Endpoint, count: int) -> list[socket.socket]:
    """Decode has no pages, because one request has them all."""
    endpoint.prefill.num_steps_allowed = 0
    first = endpoint.ask(LONG)
    endpoint.wait_until(lambda: endpoint.prefill.count("scheduled") == 1, "the first is scheduled")
    clients = [endpoint.ask(SHORT) for _ in range(count)]
    endpoint.wait_until(lambda: endpoint.decode.count("queued") == count, "all are queued")
    return [first, *clients]


def prefill(endpoint: Endpoint, count: int) -> list[socket.socket]:
    """Prefill has computed a chunk."""
    endpoint.prefill.num_steps_allowed = 1
    clients = [endpoint.ask(SHORT) for _ in range(count)]
    endpoint.wait_until(
        lambda: endpoint.prefill.count("scheduled") == count and not endpoint.prefill.num_steps_allowed, "all are begun"
    )
    return clients


def lack_rows(endpoint: Endpoint, count: int) -> list[socket.socket]:
    """Prefill has the tickets, but decode's ranks are not registered."""
    endpoint.engine.show(Role.PREFILL, endpoint.engine.table(Role.PREFILL))
    clients = [endpoint.ask(SHORT) for _ in range(count)]
    requests = endpoint.prefill.requests
    endpoint.wait_until(
        lambda: sum(request.ticket is not None for request in list(requests.values())) == count, "all have tickets"
    )
    assert endpoint.prefill.count("queued") == count
    return clients


def finish_prefill(endpoint: Endpoint, count: int) -> list[socket.socket]:
    """Prefill has computed and sent everything and forgotten it; decode has not heard of it."""
    endpoint.decode.kept_kinds = (Result, Done)
    clients = [endpoint.ask(SHORT) for _ in range(count)]
    endpoint.wait_until(
        lambda: endpoint.decode.count("receiving") == count and not endpoint.prefill.requests, "all are sent"
    )
    return clients


def transfer(endpoint: Endpoint, count: int) -> list[socket.socket]:
    """Prefill has computed everything, and its sender is in the middle of a write."""
    endpoint.engine.writer.flow.clear()
    clients = [endpoint.ask(SHORT) for _ in range(count)]
    endpoint.wait_until(lambda: endpoint.prefill.count("sending") == count, "all are being sent")
    return clients


def decode(endpoint: Endpoint, count: int) -> list[socket.socket]:
    """Decode has drawn some tokens."""
    endpoint.decode.num_steps_allowed = 1
    clients = [endpoint.ask(SHORT) for _ in range(count)]
    endpoint.wait_until(
        lambda: endpoint.decode.count("running") == count and not endpoint.decode.num_steps_allowed, "all are running"
    )
    return clients


PHASES = [queue, prefill, lack_rows, finish_prefill, transfer, decode]


def close(client: socket.socket) -> None:
    client.close()


def wait_in_vain(client: socket.socket) -> None:
    """Until the router gives the request up, and says so."""
    with closing(client):
        client.settimeout(WAIT_S)
        reply = b""
        while b"(router.request_timeout_s)" not in reply:
            part = client.recv(65536)
            assert part, f"closed after {reply!r}"
            reply += part


def leave(
    endpoint: Endpoint,
    reach: Callable[[Endpoint, int], list[socket.socket]],
    count: int,
    end: Callable[[socket.socket], None] = close,
) -> float:
    """Seconds after which nothing is left of clients that go."""
    try:
        for client in reach(endpoint, count):
            end(client)
        start_s = time.monotonic()
        if reach is transfer:
            # A write that has begun is waited for, whoever left.
            endpoint.wait_until(lambda: endpoint.prefill.count("stopping") == count, "all are stopping")
            endpoint.engine.writer.flow.set()
            start_s = time.monotonic()
        endpoint.wait_until(lambda: not endpoint.engine.leftovers and not endpoint.num_in_router(), "something is left")
        return time.monotonic() - start_s
    finally:
        endpoint.hang_up()
        endpoint.engine.release()


@pytest.mark.parametrize("reach", PHASES)
def test_a_few_leave(endpoint: Endpoint, reach: Callable[[Endpoint, int], list[socket.socket]]) -> None:
    leave(endpoint, reach, 4)
    endpoint.complete()
    endpoint.wait_until(lambda: not endpoint.engine.leftovers, "something is left")
    endpoint.engine.check_integrity()


@pytest.mark.parametrize("reach", PHASES)
def test_a_few_wait_too_long(hasty_endpoint: Endpoint, reach: Callable[[Endpoint, int], list[socket.socket]]) -> None:
    leave(hasty_endpoint, reach, 4, wait_in_vain)
    hasty_endpoint.complete()
    hasty_endpoint.wait_until(lambda: not hasty_endpoint.engine.leftovers, "something is left")
    hasty_endpoint.engine.check_integrity()


@pytest.mark.full
@pytest.mark.parametrize("reach", PHASES)
def test_a_hundred_leave(endpoint: Endpoint, reach: Callable[[Endpoint, int], list[socket.socket]]) -> None:
    assert leave(endpoint, reach, 100) < LEAVE_S
    endpoint.complete()
    endpoint.wait_until(lambda: not endpoint.engine.leftovers, "something is left")
    endpoint.engine.check_integrity()
