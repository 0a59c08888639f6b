"""One of two decode replicas is killed under eight streaming clients, none of which notices more than a pause."""

from collections.abc import Iterator

import pytest

from tests.chaos.faults import kill
from tests.chaos.streams import Crowd
from tests.chaos.watch import Before, assert_all_right, pid_of
from tests.fakes.cluster import RunningCluster, running_cluster

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(900)]

CLIENTS = 8
NUM_TOKENS = 200
SMALL = ("prefill.replicas=1", "prefill.parallel.cp=1", "kv.memory_gib=0.25")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running_cluster("deploy/local-cpu-2p2d.yaml", "test-chaos", *SMALL) as running:
        yield running


def test_a_decode_rank_is_killed_under_eight_streams(cluster: RunningCluster) -> None:
    with Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=100) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(3), 300)
        before = Before(cluster, "decode-0")
        proof = kill("decode-0 rank 0", pid_of(cluster, "decode-0"))
        detection_s = before.wait_detected()
    line = before.line("kill a decode rank", crowd, proof, detection_s, before.wait_recovered())
    assert_all_right(cluster, line, crowd)
    assert (line.continuations or 0) > 0
