"""Prefill's host is lost, and returns long after its replacement."""

from collections.abc import Iterator

import pytest

from tests.chaos.host_loss import CLIENTS, MARKS, NUM_TOKENS, cluster_over, hosts, lose_host
from tests.chaos.streams import Crowd, Stream
from tests.chaos.two_hosts import AWAY, HOME, RayNodes, cable, ray_nodes
from tests.chaos.watch import assert_all_right
from tests.fakes.cluster import RunningCluster

pytestmark = MARKS


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    with cable(), ray_nodes(num_cpus=1, num_away_cpus=2) as nodes:
        yield nodes


@pytest.fixture
def cluster(nodes: RayNodes) -> Iterator[RunningCluster]:
    with cluster_over(nodes, "test-prefill-host") as running:
        yield running


def test_a_lost_host_is_replaced(cluster: RunningCluster, nodes: RayNodes) -> None:
    """Streams with computed prompts are not affected. The returning start is refused and ends."""
    assert hosts(cluster, "prefill-0") == {AWAY}
    nodes.start(HOME, num_cpus=2)
    crowd = Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=1200)
    line = lose_host(cluster, "prefill-0", crowd, Stream(20, seed=4, prompt_len=2000))
    assert_all_right(cluster, line, crowd)
    assert line.retries == 0, "nothing was asked of the one that woke up"
