"""One of two decode replicas is killed under eight streaming clients, which notice at most a pause."""

from collections.abc import Iterator

import pytest

from tests.chaos.faults import kill
from tests.chaos.streams import Crowd, Stream
from tests.chaos.watch import Before, assert_all_right, pid_of
from tests.fakes.cluster import RunningCluster, running_cluster

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(900)]

NUM_GREEDY, NUM_SAMPLED = 2, 6
NUM_TOKENS = 500
SAMPLING = {"temperature": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.3}
SMALL = ("prefill.replicas=1", "prefill.parallel.cp=1", "kv.memory_gib=0.25")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running_cluster("deploy/local-cpu-2p2d.yaml", "test-chaos", *SMALL) as running:
        yield running


def rehearsed(cluster: RunningCluster) -> list[Stream]:
    """Return greedy and sampled requests that an idle cluster has answered, so that no prefill delays them now.

    Sampled answers are expected to repeat; most of their tokens are not the most likely ones.
    """
    greedy = [Stream(NUM_TOKENS, 100 + number) for number in range(NUM_GREEDY)]
    sampled = [Stream(NUM_TOKENS, 150 + n, sampling={"seed": n, **SAMPLING}) for n in range(NUM_SAMPLED)]
    with Crowd(cluster.url, [*greedy, *sampled]):
        pass
    for stream in sampled:
        assert (
            sum(token != likely for token, likely in zip(stream.tokens, stream.expected, strict=True)) > NUM_TOKENS / 2
        )
    return [stream.again() for stream in (*greedy, *sampled)]


def with_both_kinds(crowd: Crowd) -> str:
    """Return a replica with greedy and sampled streams that have not ended."""
    greedy, sampled = (
        {stream.decode for stream in crowd.streams if not stream.end and bool(stream.sampling) == is_sampled}
        for is_sampled in (False, True)
    )
    both = greedy & sampled
    assert both, f"no replica has streams of both kinds: greedy on {greedy}, sampled on {sampled}"
    return min(both)


def test_a_decode_rank_is_killed_under_eight_streams(cluster: RunningCluster) -> None:
    streams = rehearsed(cluster)
    with Crowd(cluster.url, streams) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(3), 300)
        victim = with_both_kinds(crowd)
        before, pid = Before(cluster, victim), pid_of(cluster, victim)
        lost = [stream for stream in crowd.streams if stream.decode == victim and not stream.end]
        proof = kill(f"{victim} rank 0", pid)
        detection_s = before.wait_detected()
    line = before.line("kill a decode rank", crowd, proof, detection_s, before.wait_recovered())
    assert_all_right(cluster, line, crowd)
    assert line.continuations == len(lost)
