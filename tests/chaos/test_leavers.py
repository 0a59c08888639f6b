"""Clients disconnect in five phases of their requests. Other clients notice nothing."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.chaos.faulty_cluster import faulty_cluster
from tests.chaos.faulty_worker import Fault, order, proofs
from tests.chaos.rest import settle
from tests.chaos.streams import Crowd, Stream
from tests.chaos.watch import Before, assert_all_right, is_computing, metric
from tests.fakes.cluster import RunningCluster
from tests.fakes.recall_prompts import LINK_LEN, chain_prompt

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.full, pytest.mark.timeout(900)]

POOL_TOKENS = 8192
# Native attention and large chunks would be over before a heartbeat shows the phase.
SETTINGS = (
    "kv.memory_gib=0.02",
    f"model.max_context={POOL_TOKENS}",
    "decode.max_fill=1.5",
    "prefill.chunk_tokens=32",
    "resources.attention=torch",
    "router.max_wait_s=60",
)
LARGE, TOO_MUCH = 6910, 4000
"""Prompt lengths: after one of the first, decode lacks pages for the second. After two, the router queues."""
LONG, NUM_TOKENS = 1150, 300
"""Output lengths: of a stream that lasts until both have been seen waiting, and of clients that disconnect."""
ROUNDS = 2
SEEN_S = 120.0
TOKEN = b'"token_ids"'


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[RunningCluster]:
    with faulty_cluster(folder, "test-chaos-leavers", *SETTINGS) as running:
        yield running


class Leaver:
    """Client with its own socket."""

    def __init__(self, cluster: RunningCluster, seed: int, prompt_len: int) -> None:
        body = {"model": "recall", "prompt": chain_prompt(prompt_len, LINK_LEN, seed=seed), "max_tokens": NUM_TOKENS}
        content = json.dumps(body | {"ignore_eos": True, "stream": True, "return_token_ids": True}).encode()
        url = urlsplit(cluster.url)
        self._socket = socket.create_connection((url.hostname, url.port))
        self._socket.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content))
        self._socket.sendall(content)
        self._socket.setblocking(False)
        self._received = b""

    @property
    def num_tokens(self) -> int:
        """Return the number of received chunks with tokens."""
        with suppress(BlockingIOError):
            self._received += self._socket.recv(1 << 20)
        return self._received.count(TOKEN)

    def leave(self) -> int:
        """Disconnect. Return the number of tokens received."""
        num_tokens = self.num_tokens
        self._socket.close()
        return num_tokens


class Leaving:
    """One client per phase, which disconnects when the phase is observed."""

    def __init__(self, cluster: RunningCluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self.num_tokens: dict[str, list[int]] = {}
        """Tokens received before disconnecting, by phase."""

    @contextmanager
    def _in(self, phase: str, seed: int, prompt_len: int) -> Iterator[Leaver]:
        """Yield a client that disconnects at the end of the context."""
        client = Leaver(self._cluster, seed, prompt_len)
        yield client
        self.num_tokens.setdefault(phase, []).append(client.leave())

    def _sees(self, is_so: Callable[[], object]) -> None:
        self._cluster.wait_until(is_so, SEEN_S)

    def wait(self, seed: int) -> None:
        """Disconnect while decode is full: waiting for pages, and waiting in the router."""
        with self._in("waiting for pages", seed, TOO_MUCH):
            self._sees(lambda: self._cluster.replicas()["decode-0"]["load"]["num_waiting"])
            with self._in("waiting in the router", seed + 1, TOO_MUCH):
                self._sees(lambda: metric(self._cluster, "baton_num_requests_waiting"))

    def compute(self, seed: int) -> None:
        """Disconnect while prefill computes."""
        with self._in("in prefill", seed, LARGE):
            self._sees(lambda: is_computing(self._cluster, "prefill-0"))

    def transfer(self, seed: int) -> None:
        """Disconnect during a write, which takes seconds."""
        num_proofs = len(proofs(self._folder))
        order(self._folder, Fault.DELAY, 1)
        with self._in("in transfer", seed, 60):
            self._sees(lambda: len(proofs(self._folder)) > num_proofs)

    def decode(self, seed: int) -> None:
        """Disconnect after some tokens."""
        with self._in("in decode", seed, 60) as client:
            self._sees(lambda: client.num_tokens >= 3)


def test_clients_disconnect_in_five_phases(cluster: RunningCluster, folder: Path) -> None:
    before, leaving, streams = Before(cluster, "decode-0"), Leaving(cluster, folder), list[Stream]()
    for seed in range(800, 800 + 100 * ROUNDS, 100):
        with Crowd(cluster.url, [Stream(LONG, seed, LARGE)]) as crowd:
            cluster.wait_until(lambda crowd=crowd: crowd.have_tokens(3), SEEN_S)
            leaving.wait(seed + 10)
        streams += crowd.streams
        for number, leave in enumerate((leaving.compute, leaving.transfer, leaving.decode)):
            settle(cluster)
            leave(seed + 20 + number)
    everybody = Crowd(cluster.url, streams)
    left = ", ".join(f"{len(counts)} {phase}" for phase, counts in leaving.num_tokens.items())
    line = before.line("clients disconnect", everybody, f"disconnected: {left}", None, None)
    assert_all_right(cluster, line, everybody)
    had_tokens = {phase: all(counts) for phase, counts in leaving.num_tokens.items() if any(counts)}
    assert (len(leaving.num_tokens), had_tokens) == (5, {"in decode": True}), leaving.num_tokens
