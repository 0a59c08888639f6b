"""Two replicas of each role on real Ray: whatever is lost, every client gets the whole right answer."""

import time
from collections.abc import Iterator

import httpx
import pytest

from tests.chaos.faults import kill, stopped
from tests.chaos.report import Line, report
from tests.chaos.streams import Crowd
from tests.fakes.cluster import RunningCluster, listener_pid, running_cluster

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(900)]

CLIENTS = 8
NUM_TOKENS = 300
RECOVERY_S = 240.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running_cluster("deploy/local-cpu-2p2d.yaml", "test-chaos", "kv.memory_gib=0.25") as running:
        yield running


def metric(cluster: RunningCluster, name: str) -> int:
    """A counter of the router."""
    lines = httpx.get(f"{cluster.url}/metrics", timeout=60, trust_env=False).text.splitlines()
    return int(float(next(line.split()[1] for line in lines if line.startswith(f"{name} "))))


def pid_of(cluster: RunningCluster, replica: str, rank: int = 0) -> int:
    """The process of one rank."""
    return listener_pid(cluster.replicas()[replica]["rows"][rank]["address"])


def is_whole(cluster: RunningCluster, replica: str, incarnation: int) -> bool:
    """Whether all four replicas are ready, this one with that start or a later one."""
    replicas = cluster.replicas()
    return (
        len(replicas) == 4
        and all(entry["ready"] for entry in replicas.values())
        and replicas[replica]["incarnation"] >= incarnation
    )


class Before:
    """What the cluster was before a fault, and the clock since then."""

    def __init__(self, cluster: RunningCluster, replica: str) -> None:
        self.cluster, self.replica = cluster, replica
        self.incarnation: int = cluster.replicas()[replica]["incarnation"]
        self.retries = metric(cluster, "baton_request_retries_total")
        self.continuations = metric(cluster, "baton_request_continuations_total")
        self.start_s = time.monotonic()

    def wait_detected(self) -> float:
        """Until the table has no ready replica of this start."""
        self.cluster.wait_until(self._is_missing, RECOVERY_S)
        return time.monotonic() - self.start_s

    def wait_recovered(self, incarnation: int) -> float:
        """Until every replica is ready and holds nothing."""
        self.cluster.wait_until(lambda: is_whole(self.cluster, self.replica, incarnation), RECOVERY_S)
        recovery_s = time.monotonic() - self.start_s
        self.cluster.wait_until(self.cluster.is_empty, 120)
        return recovery_s

    def line(self, scenario: str, crowd: Crowd, proof: str, detection_s: float, recovery_s: float) -> Line:
        """The report."""
        return report(
            scenario,
            self.cluster,
            crowd,
            proof,
            detection_s=detection_s,
            recovery_s=recovery_s,
            retries=metric(self.cluster, "baton_request_retries_total") - self.retries,
            continuations=metric(self.cluster, "baton_request_continuations_total") - self.continuations,
        )

    def _is_missing(self) -> bool:
        entry = self.cluster.replicas().get(self.replica)
        return entry is None or not entry["ready"] or entry["incarnation"] > self.incarnation


def assert_all_right(cluster: RunningCluster, line: Line, crowd: Crowd) -> None:
    ends = [stream.end for stream in crowd.streams]
    assert line.success == CLIENTS, f"{ends}\n{cluster.terminal.output}"
    assert line.leaked_pages == 0


def test_a_decode_rank_is_killed_under_eight_streams(cluster: RunningCluster) -> None:
    with Crowd(cluster.url, CLIENTS, NUM_TOKENS, seed=100) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(5), 300)
        before = Before(cluster, "decode-0")
        proof = kill("decode-0 rank 0", pid_of(cluster, "decode-0"))
        detection_s = before.wait_detected()
    recovery_s = before.wait_recovered(before.incarnation + 1)
    line = before.line("kill a decode rank", crowd, proof, detection_s, recovery_s)
    assert_all_right(cluster, line, crowd)
    assert (line.continuations or 0) > 0


@pytest.mark.full
def test_one_cp_rank_of_a_prefill_replica_is_killed(cluster: RunningCluster) -> None:
    def is_computing() -> bool:
        return cluster.replicas()["prefill-0"]["load"]["num_running"] > 0

    with Crowd(cluster.url, CLIENTS, 20, seed=200, prompt_len=30_000) as crowd:
        cluster.wait_until(is_computing, 300)
        before = Before(cluster, "prefill-0")
        proof = kill("prefill-0 rank 1", pid_of(cluster, "prefill-0", rank=1))
        detection_s = before.wait_detected()
    recovery_s = before.wait_recovered(before.incarnation + 1)
    line = before.line("kill one prefill CP rank", crowd, proof, detection_s, recovery_s)
    assert_all_right(cluster, line, crowd)
    assert (line.retries or 0) > 0


@pytest.mark.full
def test_a_decode_rank_stands_still_for_twenty_seconds(cluster: RunningCluster) -> None:
    with Crowd(cluster.url, CLIENTS, NUM_TOKENS, seed=300) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(5), 300)
        before = Before(cluster, "decode-1")
        with stopped("decode-1 rank 0", pid_of(cluster, "decode-1")) as proof:
            detection_s = before.wait_detected()
            time.sleep(max(0.0, before.start_s + 20 - time.monotonic()))
    recovery_s = before.wait_recovered(before.incarnation)
    line = before.line("SIGSTOP a decode rank 20 s, then SIGCONT", crowd, proof, detection_s, recovery_s)
    assert_all_right(cluster, line, crowd)
    assert (line.continuations or 0) > 0
