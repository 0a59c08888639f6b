"""Failed replicas without an effect on clients: other replicas compute the request again, or continue it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from router import server
from router.directory import Breakers
from tests.fakes.bootstrap import entry_of, table_of
from tests.fakes.model_folder import BOS
from tests.fakes.replica import FakeReplica
from tests.fakes.router_cluster import RouterCluster, run_cluster
from tests.fakes.waits import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RouterCluster]:
    monkeypatch.setattr(server, "Breakers", partial(Breakers, max_failures=2, open_s=3600.0))
    yield from run_cluster(folder, prefill_policy="round_robin", decode_policy="round_robin")


@contextmanager
def joined(cluster: RouterCluster, name: str) -> Iterator[FakeReplica]:
    """Add a replica, which follows the first one in turn."""
    with FakeReplica(name) as other:
        peers = (cluster.prefill.peer, cluster.decode.peer, other.peer)
        cluster.table.show(table_of(*map(entry_of, peers), version=2))
        ready = f'baton_ready_replicas{{role="{name.partition("-")[0]}"}}'
        wait_until(lambda: cluster.metric(ready) == 2)
        yield other


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_continues_after_its_last_token(cluster: RouterCluster, stream: bool) -> None:
    body = {"prompt": "abcdefgh", "max_tokens": 16, "logprobs": 1, "seed": 7}
    with joined(cluster, "decode-1") as other:
        cluster.decode.fails_after = 5
        if stream:
            events = cluster.events("/v1/completions", **body)
            choices = [event["choices"][0] for event in events]
            assert len(choices) == 16
        else:
            choices = [cluster.complete(**body)["choices"][0]]
        (first,), (second,) = cluster.decode.submits, other.submits
    assert "".join(choice["text"] for choice in choices) == "abcdefghabcdefgh"
    assert choices[-1]["finish_reason"] == "length"
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == 16
    assert (second.num_given, bytes(second.prompt_ids[1:])) == (3, b"abcdefghabc")
    assert (second.sampling, second.stopping) == (first.sampling, first.stopping)
    assert second.room != first.room
    assert cluster.metric("baton_request_continuations_total") == 1
    assert cluster.metric("baton_request_retries_total") == 0
    assert cluster.metric("baton_generation_tokens_total") == 16
    cluster.assert_empty()


def test_a_seed_is_generated_only_once(cluster: RouterCluster) -> None:
    with joined(cluster, "decode-1") as other:
        cluster.decode.fails_after = 5
        cluster.complete("abcdefgh", max_tokens=16, temperature=1.0)
        assert cluster.last_submit().sampling.seed == other.submits[0].sampling.seed != 0


def test_a_stop_string_may_begin_on_one_replica_and_end_on_another(cluster: RouterCluster) -> None:
    with joined(cluster, "decode-1") as other:
        cluster.decode.fails_after = 5
        choice = cluster.complete("abcdefgh", max_tokens=16, stop="cd")["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
        assert [*other.submits[0].prompt_ids] == [BOS, *b"abcdefghabc"]
    cluster.assert_empty()


def test_the_headers_name_the_answering_replicas(cluster: RouterCluster) -> None:
    with joined(cluster, "decode-1"):
        cluster.decode.fails = "no memory"
        for stream in (False, True):
            reply = cluster.post("/v1/completions", prompt="abc", max_tokens=3, stream=stream)
            assert (reply.status_code, reply.headers["x-baton-decode"]) == (200, "decode-1")


def test_a_failing_prefill_replica_gets_no_more_requests(cluster: RouterCluster) -> None:
    with joined(cluster, "prefill-1") as other:
        cluster.prefill.fails = "no memory"
        for count in range(1, 9):
            cluster.decode.flow.clear()  # otherwise the fake would answer before prefill has failed
            with ThreadPoolExecutor() as threads:
                answer = threads.submit(cluster.complete, "abc", max_tokens=3)
                other.wait_submits(count)
                cluster.decode.flow.set()
                assert answer.result()["choices"][0]["text"] == "abc"
        assert (len(cluster.prefill.submits), len(other.submits)) == (2, 8)
    assert cluster.metric("baton_request_retries_total") == 2
    assert cluster.metric('baton_breaker_state{replica="prefill-0",state="open"}') == 1
    assert cluster.metric('baton_breaker_state{replica="prefill-1",state="closed"}') == 1


def test_the_last_decode_replica_is_lost(cluster: RouterCluster) -> None:
    cluster.decode.flow.clear()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(cluster.post, "/v1/completions", prompt="abc", max_tokens=3, stream=True)
        cluster.decode.wait_submits(1)
        cluster.table.show(table_of(entry_of(cluster.prefill.peer), version=2, reaped={"decode-0": 1}))
        reply = waiting.result()
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"]["code"] == "no_replica"
    cluster.prefill.wait_cancels(1)
