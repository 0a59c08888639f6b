"""The main thread of a rank hangs while its other threads respond: the replica restarts, and clients notice a pause."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.faulty_cluster import faulty_cluster
from tests.chaos.faulty_worker import Fault, order, proofs
from tests.chaos.streams import Crowd
from tests.chaos.watch import Before, assert_all_right, pid_of
from tests.fakes.cluster import RunningCluster

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.full, pytest.mark.timeout(900)]

STEP_TIMEOUT_S = 6.0
CLIENTS = 4
NUM_TOKENS, PROMPT_LEN = 300, 12_000
SETTINGS = (
    "prefill.replicas=2",
    "decode.replicas=2",
    "resources.cpus_per_worker=0.25",
    "kv.memory_gib=0.25",
    f"resources.step_timeout_s={STEP_TIMEOUT_S:g}",
    "resources.silence_s=300",  # no other check ends the rank
)
SEEN_S = 60.0


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[RunningCluster]:
    with faulty_cluster(folder, "test-chaos-hung", *SETTINGS, arguments=["--worker-logs"]) as running:
        yield running


def incarnations(cluster: RunningCluster) -> dict[str, int]:
    """Return the incarnation of every replica."""
    return {name: entry["incarnation"] for name, entry in cluster.replicas().items()}


def test_idle_ranks_keep_running(cluster: RunningCluster) -> None:
    before = incarnations(cluster)
    time.sleep(2 * STEP_TIMEOUT_S)
    assert incarnations(cluster) == before


def ranks(cluster: RunningCluster, *replicas: str) -> dict[int, tuple[str, int]]:
    """Return replica and rank by process id."""
    records = cluster.replicas()
    return {
        pid_of(cluster, name, rank): (name, rank) for name in replicas for rank in range(len(records[name]["ranks"]))
    }


def hung(cluster: RunningCluster, folder: Path) -> int:
    """Return the process that hangs, once there is one."""
    cluster.wait_until(lambda: bool(proofs(folder)) and not list(folder.glob(f"{Fault.HANG}-*")), SEEN_S)
    return int(proofs(folder)[-1].removeprefix("process ").partition(":")[0])


def hang_message(replica: str, rank: int) -> str:
    return f"{replica} rank {rank} made no progress for {STEP_TIMEOUT_S:g} s (resources.step_timeout_s)"


def test_a_decode_rank_hangs_in_a_step(cluster: RunningCluster, folder: Path) -> None:
    processes = ranks(cluster, "decode-0", "decode-1")
    with Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=1700) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(5), SEEN_S)
        order(folder, Fault.HANG, 1)
        victim, rank = processes[hung(cluster, folder)]
        before = Before(cluster, victim)
        detection_s = before.wait_detected()
    line = before.line("hang in a decode step", crowd, proofs(folder)[-1], detection_s, before.wait_recovered())
    assert_all_right(cluster, line, crowd)
    assert detection_s > STEP_TIMEOUT_S / 2
    assert (line.continuations or 0) > 0
    cluster.wait_until(lambda: hang_message(victim, rank) in cluster.terminal.output, SEEN_S)


def test_one_rank_of_a_gang_hangs_in_a_step(cluster: RunningCluster, folder: Path) -> None:
    """All ranks wait for the hung one in a collective, and return together with it."""
    processes = ranks(cluster, "prefill-0", "prefill-1")
    order(folder, Fault.HANG, 1)
    with Crowd.alike(cluster.url, CLIENTS, 20, seed=1750, prompt_len=PROMPT_LEN) as crowd:
        victim, _ = processes[hung(cluster, folder)]
        before = Before(cluster, victim)
        detection_s = before.wait_detected()
    line = before.line("hang of one CP rank", crowd, proofs(folder)[-1], detection_s, before.wait_recovered())
    assert_all_right(cluster, line, crowd)
    assert detection_s > STEP_TIMEOUT_S / 2
    assert (line.retries or 0) > 0
    words = [hang_message(victim, rank) for rank in range(2)]
    cluster.wait_until(lambda: any(line in cluster.terminal.output for line in words), SEEN_S)
