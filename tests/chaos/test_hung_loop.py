"""The main thread of a rank hangs while others show life: its replica is started again, clients notice a pause."""

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
NUM_TOKENS = 300
SETTINGS = (
    "decode.replicas=2",
    "kv.memory_gib=0.25",
    f"resources.step_timeout_s={STEP_TIMEOUT_S:g}",
    "resources.silence_s=300",  # nobody else ends the rank
)
SEEN_S = 60.0


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[RunningCluster]:
    with faulty_cluster(folder, "test-chaos-hung", *SETTINGS, arguments=["--worker-logs"]) as running:
        yield running


def incarnations(cluster: RunningCluster) -> dict[str, int]:
    """Of every replica."""
    return {name: entry["incarnation"] for name, entry in cluster.replicas().items()}


def test_idle_ranks_go_on(cluster: RunningCluster) -> None:
    before = incarnations(cluster)
    time.sleep(2 * STEP_TIMEOUT_S)
    assert incarnations(cluster) == before


def test_a_decode_rank_hangs_in_a_step(cluster: RunningCluster, folder: Path) -> None:
    replicas = {pid_of(cluster, name): name for name in ("decode-0", "decode-1")}
    with Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=1700) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(5), SEEN_S)
        order(folder, Fault.HANG, 1)
        cluster.wait_until(lambda: bool(proofs(folder)), SEEN_S)
        (proof,) = proofs(folder)
        victim = replicas[int(proof.removeprefix("process ").partition(":")[0])]
        before = Before(cluster, victim)
        detection_s = before.wait_detected()
    line = before.line("hang in a decode step", crowd, proof, detection_s, before.wait_recovered())
    assert_all_right(cluster, line, crowd)
    assert detection_s > STEP_TIMEOUT_S / 2
    assert (line.continuations or 0) > 0
    told = f"{victim} rank 0 stood still for {STEP_TIMEOUT_S:g} s (resources.step_timeout_s) at the end of step"
    cluster.wait_until(lambda: told in cluster.terminal.output, SEEN_S)
