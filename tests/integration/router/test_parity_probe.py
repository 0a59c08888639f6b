"""Parity probes of a router whose replicas are fake: what clients, replicas, metrics and the log see of them."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cluster.cli.status import RouterFigures, read_figures
from cluster.launch.tools import send
from cluster.spec.messages import Drain, Submit
from cluster.spec.sampling import TokenLogprobs
from tests.fakes.replica import answer_of, logprobs_of
from tests.fakes.router_cluster import RouterCluster, run_cluster
from tests.fakes.waits import wait_until

pytestmark = pytest.mark.integration

PERIOD_S = 0.5
"""Period of probes, and so of answers that are recorded for them."""
MAX_TOKENS = 6
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": MAX_TOKENS}
COMPLETION = {"prompt": "hello", "max_tokens": MAX_TOKENS}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", COMPLETION),
    "completion with logprobs": ("/v1/completions", COMPLETION | {"logprobs": 2}),
    "completion with prompt_logprobs": ("/v1/completions", COMPLETION | {"prompt_logprobs": 1}),
    "completion with echo": ("/v1/completions", COMPLETION | {"echo": True, "stop": "lo"}),
    "completion stream": ("/v1/completions", COMPLETION | {"stream": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat with logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1}),
    "chat stream": ("/v1/chat/completions", CHAT | {"stream": True}),
    "response": ("/v1/responses", {"input": "hello", "max_output_tokens": 16}),
    "response stream": ("/v1/responses", {"input": "hello", "max_output_tokens": 16, "stream": True}),
}


@pytest.fixture(scope="module")
def probing(folder: Path) -> Iterator[RouterCluster]:
    yield from run_cluster(folder, parity_probe_s=PERIOD_S)


def results(cluster: RouterCluster) -> dict[str, float]:
    kinds = ("match", "mismatch", "failed")
    return {kind: cluster.metric(f'baton_parity_probes_total{{result="{kind}"}}') for kind in kinds}


def is_recorded(submit: Submit) -> bool:
    return submit.sampling.num_logprobs is not None and not is_probe(submit)


def is_probe(submit: Submit) -> bool:
    return submit.prefill is None


def some_recorded(cluster: RouterCluster, path: str, body: dict[str, Any]) -> list[str]:
    """Return texts of responses, one of which was recorded."""
    texts, before = list[str](), results(cluster)["match"]
    while results(cluster)["match"] == before:
        texts.append(ask(cluster, path, body))
        time.sleep(PERIOD_S / 4)
    return texts


def ask(cluster: RouterCluster, path: str, body: dict[str, Any]) -> str:
    reply = cluster.http.post(path, json={"model": "echo", "seed": 1, **body}, headers={"X-Request-Id": "same"})
    assert reply.status_code == 200, reply.text
    return reply.text


def without_times(text: str) -> str:
    return re.sub(r'"(created|created_at)":\d+', r'"\1":0', text)


@pytest.mark.parametrize("name", BODIES)
def test_clients_see_no_difference(probing: RouterCluster, shared: RouterCluster, name: str) -> None:
    path, body = BODIES[name]
    expected = without_times(ask(shared, path, body))
    assert {*map(without_times, some_recorded(probing, path, body))} == {expected}
    assert ('"logprob"' in expected or '"token_logprobs"' in expected) == ("logprobs" in name)


def test_one_answer_in_a_period_is_recorded_and_probed(probing: RouterCluster) -> None:
    """A probe repeats prompt and answer on decode, with log-probabilities of the prompt, and in no client's metric."""
    counted = ("baton_prompt_tokens_total", "baton_generation_tokens_total", "baton_prefill_skipped_total")
    wait_until(lambda: probing.metric("baton_num_requests_running") == 0)
    seen, before = len(probing.decode.submits), [probing.metric(name) for name in counted]
    num_asked, begin_s = 0, time.monotonic()
    matches = results(probing)["match"]
    while results(probing)["match"] < matches + 3:
        probing.complete("hello", max_tokens=MAX_TOKENS)
        num_asked += 1
    assert time.monotonic() - begin_s > 1.5 * PERIOD_S
    submits = probing.decode.submits[seen:]
    probes, recorded = [*filter(is_probe, submits)], [*filter(is_recorded, submits)]
    assert len(probes) == 3 <= len(recorded) <= 4 <= num_asked == len(submits) - 3
    for original, probe in zip(recorded, probes, strict=False):
        assert (original.sampling.num_logprobs, original.sampling.num_prompt_logprobs) == (0, None)
        assert [*probe.prompt_ids] == [*original.prompt_ids, *answer_of(original)[0]]
        assert (probe.sampling.num_prompt_logprobs, probe.stopping.max_tokens) == (0, 1)
    prompt_len = len(submits[0].prompt_ids)
    after = [probing.metric(name) for name in counted]
    assert after == [before[0] + num_asked * prompt_len, before[1] + num_asked * MAX_TOKENS, before[2]]


def mismatches_in_status(cluster: RouterCluster) -> int:
    figures = read_figures(cluster.url)
    assert isinstance(figures, RouterFigures)
    return figures.num_mismatches


def test_nothing_is_recorded_or_probed_by_default(shared: RouterCluster) -> None:
    shared.complete("hello", max_tokens=MAX_TOKENS)
    assert not is_recorded(shared.last_submit())
    assert not is_probe(shared.last_submit())
    metrics = shared.http.get("/metrics").text
    assert "baton_parity_probes_total{" not in metrics
    assert mismatches_in_status(shared) == 0
    assert "parity_mismatches" not in shared.http.get("/status").json()["router"]


def test_a_mismatch_reaches_metrics_status_and_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Decode's answers have other log-probabilities than the same tokens in a prompt."""

    def shifted(token_id: int, num_top: int) -> TokenLogprobs:
        return replace(logprobs_of(token_id, num_top), logprob=-9.0)

    for cluster in run_cluster(folder, parity_probe_s=PERIOD_S):
        assert results(cluster) == {"match": 0, "mismatch": 0, "failed": 0}
        assert mismatches_in_status(cluster) == 0
        monkeypatch.setattr("tests.fakes.replica.logprobs_of", shifted)
        monkeypatch.setattr("tests.fakes.replica._prompt_logprobs", true_prompt_logprobs)
        request_ids = set()
        while not results(cluster)["mismatch"]:
            request_ids.add(cluster.post("/v1/completions", **COMPLETION).headers["x-request-id"])
            time.sleep(PERIOD_S / 4)
        assert results(cluster) == {"match": 0, "mismatch": 1, "failed": 0}
        assert cluster.http.get("/status").json()["router"]["parity_mismatches"] == 1
        assert mismatches_in_status(cluster) == 1
        (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
        assert record.getMessage().startswith(
            "parity mismatch: log-probabilities of 6 tokens after a prompt of 6 differ"
        )
        assert record.facts["decode"] == record.facts["probe"] == "decode-0"  # type: ignore[attr-defined]
        assert record.facts["request_id"] in request_ids  # type: ignore[attr-defined]


def test_a_drain_does_not_wait_for_a_probe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer = threading.Event()

    def held_logprobs(submit: Submit) -> list[TokenLogprobs]:
        assert not is_probe(submit) or may_answer.wait(60)
        return true_prompt_logprobs(submit)

    monkeypatch.setattr("tests.fakes.replica._prompt_logprobs", held_logprobs)
    for cluster in run_cluster(folder, parity_probe_s=PERIOD_S, drain_s=0.5):
        while not any(map(is_probe, cluster.decode.submits)):
            cluster.complete("hello", max_tokens=MAX_TOKENS)
            time.sleep(PERIOD_S)
        send([cluster.server.address], Drain())
        is_drained = cluster.server.run()
        may_answer.set()
        assert is_drained


def true_prompt_logprobs(submit: Submit) -> list[TokenLogprobs]:
    num_top = submit.sampling.num_prompt_logprobs
    return [] if num_top is None else [logprobs_of(token_id, num_top) for token_id in submit.prompt_ids[1:]]
