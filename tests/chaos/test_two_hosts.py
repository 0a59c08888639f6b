"""Prefill on one host and decode on another, over Mooncake's TCP: the cable is cut for a moment, and for longer."""

import os
import time
from collections.abc import Iterator

import pytest

from tests.chaos.faults import GONE, state_of, stopped
from tests.chaos.streams import Crowd, Stream
from tests.chaos.two_hosts import AWAY, HOME, RayNodes, away_pid, cable, cut, ray_nodes
from tests.chaos.watch import RECOVERY_S, Before, assert_all_right
from tests.fakes.cluster import RunningCluster, running_cluster

pytestmark = [
    pytest.mark.integration,
    pytest.mark.chaos,
    pytest.mark.full,
    pytest.mark.mooncake,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a network namespace"),
]

CLIENTS = 4
NUM_TOKENS = 300
BEGIN_S = 300.0
LONG_S, SILENCE = 4.0, "resources.silence_s=15"
"""Longer than a lease, and too short to be taken for a lost host, though the first repeated packets come later."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with cable(), ray_nodes(num_cpus=2, num_away_cpus=1) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def cluster(nodes: RayNodes) -> Iterator[RunningCluster]:
    deploy, settings = "deploy/local-cpu-mooncake.yaml", ["resources.cpus_per_worker=1", "kv.memory_gib=0.25", SILENCE]
    arguments, env = ["--address", nodes.address], {"RAY_AUTH_MODE": "disabled"}
    with running_cluster(deploy, "test-two-hosts", *settings, arguments=arguments, env=env) as running:
        yield running


def assert_serves_at_home(cluster: RunningCluster) -> None:
    """A request is answered, by the start that came after the lost one."""
    stream = Stream(20, seed=3)
    stream.run(cluster.url)
    assert stream.end == "right", f"{stream.end}\n{cluster.terminal.screen}"
    assert cluster.replicas()["decode-0"]["rows"][0]["address"].startswith(f"tcp://{HOME}:")


def test_the_roles_are_on_different_hosts(cluster: RunningCluster) -> None:
    hosts = {
        name: {row["address"].removeprefix("tcp://").partition(":")[0] for row in entry["rows"]}
        for name, entry in cluster.replicas().items()
    }
    assert hosts == {"prefill-0": {HOME}, "decode-0": {AWAY}}
    stream = Stream(40, seed=1, prompt_len=4000)
    stream.run(cluster.url)
    assert stream.end == "right"


def test_a_cut_of_a_moment_is_not_noticed(cluster: RunningCluster) -> None:
    with Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=900) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(5), BEGIN_S)
        before = Before(cluster, "decode-0")
        with cut() as proof:
            time.sleep(1.0)
    recovery_s = before.wait_recovered(is_new=False)
    line = before.line("cut between hosts, 1 s", crowd, proof, None, recovery_s)
    assert_all_right(cluster, line, crowd)


def test_a_long_cut_is_told_and_mended(cluster: RunningCluster) -> None:
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
    """Its rank stands still, and wakes up when it has long been replaced and nobody could kill it.

    It is the last test: the host that comes back is no longer used.
    """
    nodes.start(HOME, num_cpus=1)
    with Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=1100) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(5), BEGIN_S)
        before, pid = Before(cluster, "decode-0"), away_pid(cluster.replicas()["decode-0"]["rows"][0]["address"])
        with cut() as proof:
            with stopped("decode-0 rank 0", pid) as still:
                detection_s = before.wait_detected()
                recovery_s = before.wait_recovered()
                assert_serves_at_home(cluster)
            assert state_of(pid) not in (GONE, "T"), "it is awake"
    replaced = Before(cluster, "decode-0")
    cluster.wait_until(lambda: state_of(pid) == GONE, RECOVERY_S)
    proof += f"; {still}, awake after {recovery_s:.1f} s, gone {replaced.passed_s:.1f} s after the cut"
    assert_serves_at_home(cluster)
    assert Before(cluster, "decode-0").incarnations == replaced.incarnations
    line = before.line("lose a host that wakes up later", crowd, proof, detection_s, recovery_s)
    assert (line.hung, line.leaked_pages) == (0, 0)
    assert line.success + line.failed == CLIENTS
