"""Loss of a host: a cluster with each role on its own host, whose remote host returns after its replacement."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from tests.chaos.faults import GONE, state_of, stopped
from tests.chaos.report import Line
from tests.chaos.streams import Crowd, Stream
from tests.chaos.two_hosts import HOME, RayNodes, away_pid, away_pids, cut, is_listened_away
from tests.chaos.watch import Before
from tests.fakes.cluster import RunningCluster, running_cluster

MARKS = [
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
GONE_S = 30.0


@contextmanager
def cluster_over(nodes: RayNodes, name: str, *settings: str) -> Iterator[RunningCluster]:
    """Run ranks with one CPU each, so that the nodes determine placement, and Mooncake between them."""
    arguments, env = ["--address", nodes.address], {"RAY_AUTH_MODE": "disabled"}
    settings = ("resources.cpus_per_worker=1", "kv.memory_gib=0.25", *settings)
    with running_cluster("deploy/local-cpu-mooncake.yaml", name, *settings, arguments=arguments, env=env) as running:
        yield running


def addresses(cluster: RunningCluster, replica: str) -> list[str]:
    """Return the addresses of a replica's ranks."""
    return [record["address"] for record in cluster.replicas()[replica]["ranks"]]


def hosts(cluster: RunningCluster, replica: str) -> set[str]:
    """Return the hosts of a replica's ranks."""
    return {address.removeprefix("tcp://").partition(":")[0] for address in addresses(cluster, replica)}


def lose_host(cluster: RunningCluster, victim: str, crowd: Crowd, probe: Stream) -> Line:
    """Lose the remote host with all ranks of ``victim`` while clients stream, and let it return after the next start.

    The ranks are stopped from the cut on, so that nobody can kill them. Their raylet is stopped until they have ended
    by themselves, because Ray kills the processes of a lost node when it returns. ``probe`` is sent to the next start.
    """
    with crowd, ExitStack() as host:
        cluster.wait_until(lambda: crowd.have_tokens(5), BEGIN_S)
        before, listened = Before(cluster, victim), addresses(cluster, victim)
        pids = [away_pid(address) for address in listened]
        with cut() as proof, ExitStack() as standing:
            for raylet in away_pids("raylet"):
                host.enter_context(stopped("raylet", raylet))
            still = [standing.enter_context(stopped(f"{victim} rank {n}", pid)) for n, pid in enumerate(pids)]
            detection_s = before.wait_detected()
            recovery_s = before.wait_recovered()
            _assert_serves_at_home(cluster, victim, probe)
            standing.close()
            assert all(state_of(pid) not in (GONE, "T") for pid in pids), "they are awake"
        ended_s = _wait_ended(cluster, victim, listened)
    cluster.wait_until(lambda: all(state_of(pid) == GONE for pid in pids), GONE_S)
    proof += f"; {'; '.join(still)}, resumed after {recovery_s:.1f} s, exited {ended_s:.1f} s after the cut ended"
    _assert_serves_at_home(cluster, victim, Stream(probe.num_tokens, probe.seed + 1, probe.prompt_len))
    return before.line(f"lose the host of {victim}, which resumes later", crowd, proof, detection_s, recovery_s)


def _wait_ended(cluster: RunningCluster, victim: str, listened: Sequence[str]) -> float:
    """Return the seconds until nobody listens there. Meanwhile, the table must contain the later start."""
    incarnation = cluster.replicas()[victim]["incarnation"]

    def have_ended() -> bool:
        assert cluster.replicas()[victim]["incarnation"] == incarnation, cluster.terminal.screen
        return not any(is_listened_away(address) for address in listened)

    return cluster.wait_until(have_ended, GONE_S)


def _assert_serves_at_home(cluster: RunningCluster, replica: str, probe: Stream) -> None:
    """Check that the later start answers a request."""
    probe.run(cluster.url)
    assert probe.end == "right", f"{probe.end}\n{cluster.terminal.screen}"
    assert hosts(cluster, replica) == {HOME}
