"""Replicas that join, fail and leave under open requests."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.spec.config import PrefillConfig
from tests.fakes.bootstrap import entry_of, table_of
from tests.fakes.model_folder import BOS
from tests.fakes.router_cluster import MODEL, RouterCluster, run_cluster
from tests.fakes.waits import wait_until

pytestmark = pytest.mark.integration


class TestReplicasComeAndGo:
    def test_no_ready_replica_is_503(self, cluster: RouterCluster) -> None:
        cluster.table.show(table_of(entry_of(cluster.prefill.peer), version=2, reaped={"decode-0": 1}))
        deadline_s = time.monotonic() + 60
        while (reply := cluster.http.get("/ready")).status_code == 200:
            assert time.monotonic() < deadline_s
        assert reply.json()["error"]["message"] == "no decode replica is ready"
        for stream in (False, True):
            refused = cluster.post("/v1/completions", prompt="x", stream=stream)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "not_ready"

    @pytest.mark.parametrize("stream", [False, True])
    def test_prefill_fails(self, cluster: RouterCluster, stream: bool) -> None:
        cluster.decode.flow.clear()
        cluster.prefill.fails = "no memory"
        reply = cluster.post("/v1/completions", prompt="x", stream=stream)
        assert (reply.status_code, reply.json()["error"]["message"]) == (503, "prefill-0: no memory")
        rooms = [submit.room for submit in cluster.prefill.submits]
        assert [cancel.room for cancel in cluster.decode.wait_cancels(4)] == rooms
        assert len(set(rooms)) == 4, "one attempt and three retries"
        cluster.assert_empty()

    def test_replica_is_reaped_under_a_request(self, cluster: RouterCluster) -> None:
        cluster.decode.flow.clear()
        with cluster.http.stream(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True}
        ) as reply:
            lines = reply.iter_lines()
            assert next(lines) == ""
            cluster.table.show(table_of(entry_of(cluster.decode.peer), version=2, reaped={"prefill-0": 1}))
            error = next(line for line in lines if line.startswith("data: "))
        assert "prefill-0 was lost" in error
        cluster.decode.wait_cancels(1)

    def test_a_lost_token_is_computed_again(self, cluster: RouterCluster) -> None:
        cluster.decode.skips = 1
        assert cluster.complete("abcdef", max_tokens=12)["choices"][0]["text"] == "abcdefabcdef"
        assert [submit.num_given for submit in cluster.decode.submits] == [0, 3]

    def test_repeatedly_lost_tokens_fail_the_request(self, cluster: RouterCluster) -> None:
        cluster.decode.skips = 4
        reply = cluster.post("/v1/completions", prompt="abcdef", max_tokens=60)
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "broken_output")
        assert reply.json()["error"]["message"] == "decode-0: output 12 is missing; 15 arrived instead"
        cluster.decode.wait_cancels(4)

    def test_a_request_waits_in_the_router_until_decode_has_capacity(self, cluster: RouterCluster) -> None:
        # Pools of 4 tokens, filled 16 times by the choices of one request, of which only one counts the prompt.
        entries = (entry_of(peer, total_pages=1) for peer in (cluster.prefill.peer, cluster.decode.peer))
        cluster.table.show(table_of(*entries, version=2))
        wait_until(lambda: cluster.http.get("/v1/models").json()["data"][0]["max_model_len"] == 4)
        cluster.decode.flow.clear()
        body = {"prompt": "a", "max_tokens": 2}
        with ThreadPoolExecutor() as threads:
            first = threads.submit(cluster.post, "/v1/completions", **body, n=31)
            cluster.decode.wait_submits(31)
            second = threads.submit(cluster.post, "/v1/completions", **body)
            wait_until(lambda: cluster.metric("baton_num_requests_waiting"))
            assert len(cluster.decode.submits) == 31
            cluster.decode.flow.set()
            assert [reply.result().status_code for reply in (first, second)] == [200, 200]
        cluster.assert_empty()

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_full_queue_refuses_with_429_and_takes_requests_again(self, folder: Path, stream: bool) -> None:
        for cluster in run_cluster(folder, PrefillConfig(max_queued_tokens=20), max_waiting_requests=0):
            cluster.decode.flow.clear()
            with ThreadPoolExecutor() as threads:
                # A request above the limit is accepted if it is the only one.
                first = threads.submit(cluster.complete, [BOS] + [97] * 20, max_tokens=4)
                cluster.decode.wait_submits(1)
                refused = cluster.post("/v1/completions", prompt="hello", stream=stream)
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
                error = refused.json()["error"]
                assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
                wait = "20 prompt tokens or more (prefill.max_queued_tokens) wait at every prefill replica"
                assert error["message"] == f"the queue is full: {wait}; try again later"
                assert len(cluster.decode.submits) == 1
                cluster.decode.flow.set()
                first.result()
            assert cluster.post("/v1/completions", prompt="hello", stream=stream).status_code == 200

    def test_deadline(self, folder: Path) -> None:
        for cluster in run_cluster(folder, request_timeout_s=0.2):
            cluster.decode.flow.clear()
            reply = cluster.post("/v1/completions", prompt="x")
            assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timed_out")
            cluster.prefill.wait_cancels(1)
            cluster.decode.wait_cancels(1)
