"""The page at ``/`` and the data that it reads."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from cluster.cli.status import RouterFigures, read_figures
from cluster.spec.registry import RankCoords, ReplicaLoad, SendTimes
from tests.fakes.bootstrap import entry_of, table_of
from tests.fakes.replica import PHASES
from tests.fakes.router_cluster import MODEL, STARTED, RouterCluster, run_cluster

pytestmark = pytest.mark.integration


def test_the_page_is_self_contained(shared: RouterCluster) -> None:
    page = shared.http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>Baton</title>" in page.text
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert 'fetch("status"' in page.text


def test_the_command_line_measures_rates(shared: RouterCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    shared.complete("abc", max_tokens=4)
    meanwhile = SimpleNamespace(sleep=lambda _: shared.complete("abc", max_tokens=9))
    monkeypatch.setattr("cluster.cli.status.time", meanwhile)
    figures = read_figures(shared.url)
    assert isinstance(figures, RouterFigures)
    assert (figures.prompt_tokens_per_s, figures.output_tokens_per_s) == pytest.approx((4, 9))
    assert 0 < figures.hit_rate <= 1
    assert str(figures).startswith("router: 0 open, 0 waiting, 4 prompt tokens/s, 9 output tokens/s, cache hits ")
    assert read_figures("http://127.0.0.1:9") == "router: does not respond"


def test_it_reads_topology_totals_and_recent_requests(cluster: RouterCluster) -> None:
    sends = (SendTimes(global_rank=0, num_transfers=1, num_bytes=4096, write_s=0.1),)
    load = ReplicaLoad(free_pages=1, total_pages=4, cached_pages=2, num_running=3, sends=sends)
    prefill = msgspec.structs.replace(entry_of(cluster.prefill.peer), load=load)
    ranks = tuple(msgspec.structs.replace(record, device="GPU 3") for record in prefill.ranks)
    prefill = msgspec.structs.replace(prefill, ranks=ranks)
    cluster.table.show(table_of(prefill, entry_of(cluster.decode.peer), version=2))
    done = cluster.complete("abc", max_tokens=9)
    cluster.decode.fails = "no memory"
    cluster.post("/v1/completions", prompt="abc")
    status: Any = cluster.http.get("/status").json()
    assert (status["model"], status["router"]) == (
        MODEL,
        {"name": "router", "open": 0, "waiting": 0, "draining": False},
    )
    assert status["started"] == STARTED
    assert status["totals"]["generation_tokens"] == 9
    assert (status["totals"]["kv_bytes"], status["totals"]["parity_mismatches"]) == (4096, 0)
    first, second = status["replicas"]
    assert (first["replica"], first["role"], first["ready"], first["load"]["free_pages"]) == (
        "prefill-0",
        "prefill",
        True,
        1,
    )
    coords = msgspec.structs.asdict(RankCoords(dp=0, cp=0, tp=0, pp=0))
    address = cluster.prefill.peer.address
    rank = {"global_rank": 0, "address": address, "node": "127.0.0.1", "device": "GPU 3", "sent_bytes": 4096}
    assert first["ranks"] == [coords | rank]
    assert second["replica"] == "decode-0"
    failed, finished = status["recent"]
    assert (failed["outcome"], finished["outcome"]) == ("failed", "finished")
    assert [phase["name"] for phase in failed["phases"]] == ["preprocess", "queue"]
    assert (f"cmpl-{finished['id']}", finished["key"]) == (done["id"], "anybody")
    assert (finished["prompt_tokens"], finished["num_tokens"]) == (4, 9)
    assert [phase["name"] for phase in finished["phases"]] == PHASES
    assert [phase["replica"] for phase in finished["phases"]] == [None] * 2 + [
        *["decode-0"] + ["prefill-0"] * 5 + ["decode-0"] * 3
    ]
    assert sum(phase["seconds"] for phase in finished["phases"]) == pytest.approx(finished["seconds"])


def test_it_counts_latencies_in_buckets(cluster: RouterCluster) -> None:
    for _ in range(3):
        cluster.complete("abc", max_tokens=9)
    latencies: Any = cluster.http.get("/status").json()["latencies"]
    for name, number in (("ttft", 3), ("itl", 6)):
        counted = latencies[name]
        assert len(counted["counts"]) == len(counted["bounds"]) + 1
        assert sum(counted["counts"]) == number


def test_it_shows_open_requests_by_age_until_they_end(cluster: RouterCluster) -> None:
    def shown() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = cluster.http.get("/status").json()["open"]
        return found

    def until(phases: list[str]) -> list[dict[str, Any]]:
        deadline_s = time.monotonic() + 30
        while [one["phase"] for one in shown()] != phases:
            assert time.monotonic() < deadline_s, shown()
            time.sleep(0.01)
        return shown()

    assert shown() == []
    cluster.decode.flow.clear()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(cluster.complete, "abc", max_tokens=90, n=2)
        until(["prefill"])
        second = pool.submit(cluster.complete, "abcdef", max_tokens=90)
        older, newer = until(["prefill", "prefill"])
        assert older["age"] > newer["age"] > 0
        facts = {"key": "anybody", "prefill": "prefill-0", "decode": "decode-0", "num_tokens": 0}
        assert {name: older[name] for name in facts} == facts
        assert (older["prompt_tokens"], newer["prompt_tokens"]) == (4, 7)
        cluster.decode.token_s = 0.05
        cluster.decode.flow.set()
        assert all(one["num_tokens"] > 0 for one in until(["decode", "decode"]))
        assert first.result()["id"] == f"cmpl-{older['id']}"
        second.result()
    assert shown() == []


@pytest.fixture
def guarded(folder: Path, tmp_path: Path) -> Iterator[RouterCluster]:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: a, key: a-secret-of-a}\n")
    yield from run_cluster(folder, api_keys_file=str(keys))


def test_its_data_needs_a_key_like_other_routes(guarded: RouterCluster) -> None:
    assert guarded.http.get("/").status_code == 200
    assert guarded.http.get("/status").status_code == 401
    known = {"Authorization": "Bearer a-secret-of-a"}
    assert httpx.get(f"{guarded.url}/status", headers=known).status_code == 200
