"""Reports of a whole cluster on real Ray about its requests: traces, phases and hits."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.bench.dataset import read_trace
from cluster.bench.workload import trace_workload
from tests.fakes.cluster import RunningCluster
from tests.fakes.recall_prompts import needle_prompt
from tests.fakes.trace_events import arrows, check_trace, complete_events, process_names
from tests.fakes.traces import prompt_ids, unbounded_hit_rate, write_trace

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PAGE_SIZE = 64


def test_a_trace_shows_what_every_rank_did_for_one_request(cluster: RunningCluster, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    _bench(cluster, "--num-requests", "1", "--input-len", "9000", "--output-len", "4", "--trace-out", str(out))
    trace = json.loads(out.read_text())
    check_trace(trace)
    assert trace["otherData"] == {"ranks that did not answer": [], "omitted intervals": {}}
    did = {
        name: [event for event in complete_events(trace) if event["pid"] == pid]
        for pid, name in process_names(trace).items()
    }
    assert list(did) == ["router", "prefill-0 rank 0", "prefill-0 rank 1", "decode-0 rank 0"]
    for rank in ("prefill-0 rank 0", "prefill-0 rank 1"):
        assert _total(did[rank], "step", "tokens") == 9000
        assert _track(did[rank], "collectives")
    pages = sum(_total(did[f"prefill-0 rank {rank}"], "write", "pages") for rank in (0, 1))
    assert pages == -(-9000 // PAGE_SIZE)
    for rank in ("prefill-0 rank 0", "prefill-0 rank 1"):
        writes = [event["args"]["pages"] for event in did[rank] if event["name"] == "write"]
        assert writes[-2] == 0, "the last pages left all at once, not the layers that were there before the others"
    assert _total(did["decode-0 rank 0"], "step", "tokens") == 3
    assert [event["name"] for event in _track(did["prefill-0 rank 0"], "request")] == ["queued", "scheduled", "sending"]
    states = [event["name"] for event in _track(did["decode-0 rank 0"], "request")]
    assert states == ["queued", "receiving", "verifying", "running"]
    begins, ends = arrows(trace)
    assert len(begins) == sum(len(_track(events, "kv sender")) for events in did.values())
    assert {process_names(trace)[end["pid"]] for end in ends.values()} == {"decode-0 rank 0"}


def test_the_phases_of_requests_under_load_add_up_to_the_time_to_first_token(cluster: RunningCluster) -> None:
    def ask(seed: int) -> float:
        """Return the share of the client's time to first token that the phases explain."""
        body = {"model": "recall", "prompt": needle_prompt(1000, 0.5, seed=seed), "max_tokens": 2, "stream": True}
        begin_s = time.monotonic()
        with client.stream("POST", "/v1/completions", json=body) as response:
            waited_ms = 1000 * (time.monotonic() - begin_s)
            response.raise_for_status().read()
        parts = (part.split(";dur=") for part in response.headers["server-timing"].split(", "))
        times = {name: float(ms) for name, ms in parts}
        ttft = times.pop("ttft")
        assert times.keys() >= {"preprocess", "queue", "decode-queue", "bootstrap", "prefill", "transfer", "delivery"}
        assert min(times.values()) >= 0
        assert times["prefill"] > 0
        assert sum(times.values()) == pytest.approx(ttft, rel=0.001)
        return ttft / waited_ms

    with httpx.Client(base_url=cluster.url, timeout=300) as client, ThreadPoolExecutor(8) as pool:
        shares = sorted(pool.map(ask, range(48)))
    print(f"shares of the client's time: least {shares[0]:.3f}, median {shares[24]:.3f}, most {shares[-1]:.3f}")
    assert shares[-1] <= 1
    reported = [
        f'baton_{name}_total{{rank="1",replica="prefill-0"}}' for name in ("kv_transfer_bytes", "rank_step_seconds")
    ]
    for line in (*reported, 'baton_prefill_steps_total{passing="",replica="prefill-0",strategy='):
        cluster.wait_until(lambda line=line: line in httpx.get(f"{cluster.url}/metrics", timeout=60).text, 60)


def test_a_replayed_trace_hits_as_often_as_an_endless_cache_would(cluster: RunningCluster, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", num_requests=40)
    # Of two requests at once that share new pages, the second computes them as well, so there is one at a time.
    report = _bench(
        cluster, "--dataset", str(trace), "--trace-scale", "0.25", "--trace-speed", "100", "--concurrency", "1"
    )
    assert (report["completed"], report["failed"]) == (40, 0)
    assert 0.2 < report["hit_rate"] < 0.95
    prompts = [prompt_ids(request) for request in trace_workload(read_trace(trace), scale=0.25).requests]
    assert report["hit_rate"] == unbounded_hit_rate(prompts, 64)


def _bench(cluster: RunningCluster, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "cluster.cli", "bench", "serve", "--url", cluster.url, "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _track(events: list[dict[str, Any]], track: str) -> list[dict[str, Any]]:
    return [event for event in events if event["cat"] == track]


def _total(events: list[dict[str, Any]], name: str, fact: str) -> int:
    return sum(event["args"][fact] for event in events if event["name"].startswith(name))
