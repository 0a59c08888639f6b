"""Two replicas per role on real Ray: after any loss, every client gets its complete answer."""

import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.chaos.faults import GONE, kill, state_of, stopped
from tests.chaos.streams import Crowd, Stream
from tests.chaos.watch import RECOVERY_S, Before, assert_all_right, is_computing, pid_of
from tests.fakes.cluster import BATON, RunningCluster, running_cluster

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.full, pytest.mark.timeout(900)]

NAME = "test-chaos-two"
CLIENTS = 8
NUM_TOKENS = 300
BEGIN_S = 300.0
MOMENT_S = 6.0
"""Longer than a lease, and shorter than `resources.silence_s`."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running_cluster("deploy/local-cpu-2p2d.yaml", NAME, "kv.memory_gib=0.25") as running:
        yield running


def test_one_cp_rank_of_a_prefill_replica_is_killed(cluster: RunningCluster) -> None:
    with Crowd.alike(cluster.url, CLIENTS, 20, seed=200, prompt_len=12_000) as crowd:
        cluster.wait_until(lambda: is_computing(cluster, "prefill-0"), BEGIN_S)
        before = Before(cluster, "prefill-0")
        proof = kill("prefill-0 rank 1", pid_of(cluster, "prefill-0", rank=1))
        detection_s = before.wait_detected()
    line = before.line("kill one prefill CP rank", crowd, proof, detection_s, before.wait_recovered())
    assert_all_right(cluster, line, crowd)
    assert (line.retries or 0) > 0


def test_a_decode_rank_that_stands_still_is_killed(cluster: RunningCluster) -> None:
    with Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=300) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(5), BEGIN_S)
        before, pid = Before(cluster, "decode-1"), pid_of(cluster, "decode-1")
        with stopped("decode-1 rank 0", pid) as proof:
            detection_s = before.wait_detected()
            cluster.wait_until(lambda: state_of(pid) == GONE, RECOVERY_S)
    recovery_s = before.wait_recovered()
    line = before.line("SIGSTOP a decode rank", crowd, f"{proof}, and was killed", detection_s, recovery_s)
    assert_all_right(cluster, line, crowd)
    assert (line.continuations or 0) > 0


def test_a_briefly_stopped_decode_rank_continues(cluster: RunningCluster) -> None:
    """The rank's streams continue elsewhere, and its messages after the pause are too late."""
    with Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=350) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(5), BEGIN_S)
        before, pid = Before(cluster, "decode-0"), pid_of(cluster, "decode-0")
        with stopped("decode-0 rank 0", pid) as proof:
            detection_s = before.wait_detected()
            time.sleep(max(0.0, MOMENT_S - before.passed_s))
        recovery_s = before.wait_recovered(is_new=False)
    line = before.line(f"SIGSTOP a decode rank for {MOMENT_S:g} s", crowd, proof, detection_s, recovery_s)
    assert_all_right(cluster, line, crowd)
    assert (line.continuations or 0) > 0
    assert pid_of(cluster, "decode-0") == pid
    assert Before(cluster, "decode-0").incarnations == before.incarnations


def test_a_prefill_rank_that_stands_still_is_killed(cluster: RunningCluster) -> None:
    with Crowd.alike(cluster.url, CLIENTS, 20, seed=1700, prompt_len=12_000) as crowd:
        cluster.wait_until(lambda: is_computing(cluster, "prefill-1"), BEGIN_S)
        before, pid = Before(cluster, "prefill-1"), pid_of(cluster, "prefill-1", rank=1)
        with stopped("prefill-1 rank 1", pid) as proof:
            detection_s = before.wait_detected()
            cluster.wait_until(lambda: state_of(pid) == GONE, RECOVERY_S)
    recovery_s = before.wait_recovered()
    line = before.line("SIGSTOP a prefill rank", crowd, f"{proof}, and was killed", detection_s, recovery_s)
    assert_all_right(cluster, line, crowd)
    assert (line.retries or 0) > 0


def test_all_replicas_restart_one_by_one(cluster: RunningCluster) -> None:
    before, streams = Before(cluster, "decode-1"), list[Stream]()
    order = [*BATON, "restart", "--rolling", "--cluster", NAME]
    with subprocess.Popen(order, stderr=subprocess.PIPE, text=True) as restart:
        while restart.poll() is None:
            with Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=1800 + len(streams)) as crowd:
                streams += crowd.streams
        errors = restart.communicate()[1]
    recovery_s = before.wait_recovered()
    assert restart.returncode == 0, errors
    after = {name: entry["incarnation"] for name, entry in cluster.replicas().items()}
    assert all(after[name] > incarnation for name, incarnation in before.incarnations.items())
    everybody = Crowd(cluster.url, streams)
    proof = f"all of {', '.join(after)} have later incarnations than before"
    line = before.line("rolling restart", everybody, proof, None, recovery_s)
    assert_all_right(cluster, line, everybody)
