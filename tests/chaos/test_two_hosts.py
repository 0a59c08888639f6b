"""Prefill and decode on separate hosts with Mooncake over TCP: the network is cut briefly, and for longer."""

import time
from collections.abc import Iterator

import pytest

from tests.chaos.host_loss import BEGIN_S, CLIENTS, MARKS, NUM_TOKENS, cluster_over, hosts, lose_host
from tests.chaos.streams import Crowd, Stream
from tests.chaos.two_hosts import AWAY, HOME, RayNodes, cable, cut, ray_nodes
from tests.chaos.watch import Before, assert_all_right
from tests.fakes.cluster import RunningCluster

pytestmark = MARKS

LONG_S, SILENCE = 4.0, "resources.silence_s=15"
"""Longer than a lease and shorter than the loss of a host, though the first retransmissions come later."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with cable(), ray_nodes(num_cpus=2, num_away_cpus=1) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def cluster(nodes: RayNodes) -> Iterator[RunningCluster]:
    with cluster_over(nodes, "test-two-hosts", SILENCE) as running:
        yield running


def test_the_roles_are_on_different_hosts(cluster: RunningCluster) -> None:
    assert (hosts(cluster, "prefill-0"), hosts(cluster, "decode-0")) == ({HOME}, {AWAY})
    stream = Stream(40, seed=1, prompt_len=4000)
    stream.run(cluster.url)
    assert stream.end == "right"


def test_a_brief_partition_is_not_noticed(cluster: RunningCluster) -> None:
    with Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=900) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(5), BEGIN_S)
        before = Before(cluster, "decode-0")
        with cut() as proof:
            time.sleep(1.0)
    recovery_s = before.wait_recovered(is_new=False)
    line = before.line("cut between hosts, 1 s", crowd, proof, None, recovery_s)
    assert_all_right(cluster, line, crowd)


def test_a_long_partition_is_reported_and_recovered(cluster: RunningCluster) -> None:
    with Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=1000) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(5), BEGIN_S)
        before = Before(cluster, "decode-0")
        with cut() as proof:
            detection_s = before.wait_detected()
            time.sleep(max(0.0, LONG_S - before.passed_s))
        recovery_s = before.wait_recovered(is_new=False)
    line = before.line(f"cut between hosts, {LONG_S:g} s", crowd, proof, detection_s, recovery_s)
    assert (line.hung, line.leaked_pages) == (0, 0)
    assert line.success + line.failed == CLIENTS
    assert all("decode-0" in stream.end for stream in crowd.streams if stream.end != "right")
    stream = Stream(20, seed=2)
    stream.run(cluster.url)
    assert stream.end == "right", f"{stream.end}\n{cluster.terminal.screen}"


def test_a_lost_host_is_replaced(cluster: RunningCluster, nodes: RayNodes) -> None:
    """Runs last, because the returning host is not used again."""
    nodes.start(HOME, num_cpus=1)
    crowd = Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=1100)
    line = lose_host(cluster, "decode-0", crowd, Stream(20, seed=3))
    assert (line.hung, line.leaked_pages) == (0, 0)
    assert line.success + line.failed == CLIENTS
    assert all("decode-0" in stream.end for stream in crowd.streams if stream.end != "right")
