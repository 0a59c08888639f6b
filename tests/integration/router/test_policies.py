"""Routing policies seen from outside: the response names the replica."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.spec.config import DeployConfig, PrefillConfig
from cluster.spec.kv import page_keys
from tests.fakes.bootstrap import FakeTable, entry_of, table_of
from tests.fakes.model_folder import BOS
from tests.fakes.replica import FakeReplica
from tests.fakes.router_cluster import MODEL, make_server, wait_ready
from tests.fakes.waits import wait_until

pytestmark = pytest.mark.integration


NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
PAGE_SIZE = DeployConfig().kv.page_size
SHARED = [BOS, *b"shared" * PAGE_SIZE][: 3 * PAGE_SIZE]


def serve(folder: Path, cached: list[int] | None = None, **router: Any) -> Iterator[httpx.Client]:
    """Run a router with two prefill and two decode replicas. The second one of each has cached some tokens."""
    table = FakeTable()
    replicas = [FakeReplica(name) for name in NAMES]
    for replica in replicas[1::2]:
        replica.page_keys = page_keys(cached or [], PAGE_SIZE)
    with replicas[0], replicas[1], replicas[2], replicas[3]:
        server = make_server(folder, table, **router)
        table.show(table_of(*(entry_of(replica.peer) for replica in replicas)))
        with httpx.Client(base_url=server.start(), timeout=60, trust_env=False) as client:
            wait_ready(client)
            yield client
        server.stop()


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[httpx.Client]:
    yield from serve(folder, prefill_policy="session", decode_policy="follow_room")


def homes(http: httpx.Client, count: int, session: str = "", **body: object) -> Counter[str]:
    headers = {"x-session-id": session} if session else {}
    asked = {"model": MODEL, "prompt": "hello", "max_tokens": 1, **body}
    replies = [http.post("/v1/completions", json=asked, headers=headers) for _ in range(count)]
    return Counter(reply.headers["x-baton-prefill"] for reply in replies)


def test_a_session_stays_on_one_replica(http: httpx.Client) -> None:
    by_header = {name: homes(http, 4, session=name) for name in map(str, range(8))}
    assert all(len(counts) == 1 for counts in by_header.values())
    assert len(set().union(*by_header.values())) == 2
    for field in ("prompt_cache_key", "user"):
        assert homes(http, 4, **{field: "3"}) == by_header["3"]
        assert homes(http, 2, session="3", **{field: "4"}) == homes(http, 2, session="3")


def test_prompts_are_routed_to_their_cached_prefix_and_others_by_load(folder: Path) -> None:
    for http in serve(folder, SHARED, decode_policy="prefix_aware"):
        wait_for_pages(http)
        assert homes(http, 6, prompt=[*SHARED, 97]) == {"prefill-1": 6}
        names = ("known_total", 'missed_total{reason="evicted"}', "hits_total")
        counts = [metric(http, f"baton_prefix_cache_{name}") for name in names]
        assert counts == [6 * 3 * PAGE_SIZE, 6 * 3 * PAGE_SIZE, 0], "these replicas compute what they say they have"
        assert homes(http, 6, prompt=[*SHARED[:PAGE_SIZE], 97]) == {"prefill-1": 6}
        # The last token is always computed, so one page less can be cached.
        assert homes(http, 6, prompt=SHARED[:PAGE_SIZE]) == {"prefill-0": 3, "prefill-1": 3}
        for name in ("cache_salt", "extra_key"):
            assert homes(http, 6, prompt=[*SHARED, 97], **{name: "mine"}) == {"prefill-0": 3, "prefill-1": 3}
        assert homes(http, 6, prompt="hello") == {"prefill-0": 3, "prefill-1": 3}
        reply = http.post("/v1/completions", json={"model": MODEL, "prompt": [*SHARED, 97], "max_tokens": 1})
        assert reply.headers["x-baton-decode"] == "decode-1"


def test_decode_computes_short_uncached_prompts(folder: Path) -> None:
    limits = PrefillConfig(skip_below_tokens=PAGE_SIZE + 2)
    for http in serve(folder, SHARED, limits=limits, decode_policy="prefix_aware"):
        wait_for_pages(http)
        assert homes(http, 2, prompt=[BOS] * (PAGE_SIZE + 1)).keys() <= {"decode-0", "decode-1"}
        assert homes(http, 2, prompt=[BOS] * (PAGE_SIZE + 2)).keys() <= {"prefill-0", "prefill-1"}
        assert homes(http, 2, prompt=[*SHARED, *[97] * PAGE_SIZE]) == {"decode-1": 2}
        # Prompt log-probabilities require the whole prompt.
        assert homes(http, 2, prompt=[*SHARED, 97], prompt_logprobs=0).keys() <= {"prefill-0", "prefill-1"}
        assert homes(http, 1, prompt=[*SHARED, 97], n=3) == {"decode-1": 1}
        assert metric(http, "baton_prefill_skipped_total") == 5


def wait_for_pages(http: httpx.Client) -> None:
    wait_until(lambda: metric(http, "baton_router_known_pages") == 6)


def metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0.0)
