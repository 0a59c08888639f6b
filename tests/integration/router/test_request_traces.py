"""``trace: true`` over real sockets, with replicas that answer immediately, late, or never."""

import pytest

from router import request_trace
from tests.fakes.router_cluster import RouterCluster
from tests.fakes.trace_events import check_trace, complete_events, process_names

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("stream", [False, True])
def test_every_process_has_its_part(shared: RouterCluster, stream: bool) -> None:
    reply = shared.post("/v1/completions", prompt="hello", max_tokens=7, trace=True, stream=stream)
    assert shared.last_submit().traced
    trace = shared.http.get(reply.headers["x-baton-trace"]).raise_for_status().json()
    check_trace(trace)
    assert list(process_names(trace).values()) == ["router", "prefill-0 rank 0", "decode-0 rank 0"]
    assert [event["name"] for event in complete_events(trace)] == [
        "read and tokenize",
        "wait for the first token",
        "stream",
        "step 1",
        "step 1",
    ]
    assert trace["otherData"]["ranks that did not answer"] == []


def test_untraced_requests_leave_no_trace(shared: RouterCluster) -> None:
    reply = shared.post("/v1/completions", prompt="hello", max_tokens=3)
    assert "x-baton-trace" not in reply.headers
    assert not shared.last_submit().traced


def test_an_unknown_trace_is_404(shared: RouterCluster) -> None:
    reply = shared.http.get("/traces/7")
    assert reply.status_code == 404
    assert reply.json()["error"]["message"] == "there is no trace 7; a router process keeps only recent traces"
    assert shared.http.get("/traces/x").status_code == 404


def test_only_one_prompt_can_be_timed(shared: RouterCluster) -> None:
    reply = shared.post("/v1/completions", prompt=["one", "two"], trace=True)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "trace: at most one prompt can be traced, got 2"


def test_a_rank_that_does_not_answer_is_named(cluster: RouterCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_trace, "GATHER_S", 0.05)
    cluster.prefill.silent = True
    reply = cluster.post("/v1/completions", prompt="hello", max_tokens=3, trace=True)
    trace = cluster.http.get(reply.headers["x-baton-trace"]).json()
    cluster.prefill.silent = False
    check_trace(trace)
    assert trace["otherData"]["ranks that did not answer"] == ["prefill-0 rank 0"]
