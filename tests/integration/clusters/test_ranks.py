"""A real cluster whose replicas are cut by tp, pp and dp: an exact answer, every rank in sight, and a lost rank."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.fakes.clients import NEEDLE_TOKENS
from tests.fakes.cluster import RunningCluster, listener_pid, running_cluster
from tests.fakes.recall_prompts import needle_prompt, recall_oracle

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NAME = "test-ranks"
SETTINGS = {
    "prefill.parallel.cp": 1,
    "prefill.parallel.tp": 2,
    "prefill.parallel.pp": 2,
    "decode.parallel.dp": 2,
    "kv.memory_gib": 0.05,
    "resources.cpus_per_worker": 0.25,
}
PROMPT = needle_prompt(3000, 0.5)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    changes = [f"{key}={value}" for key, value in SETTINGS.items()]
    with running_cluster("deploy/local-cpu.yaml", NAME, *changes) as running:
        yield running


def shown_ranks() -> list[list[str]]:
    """Replica, rank, dp, cp, tp and pp of every rank that `baton status` shows."""
    command = [sys.executable, "-m", "cluster.cli", "status", NAME]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [line.split()[:6] for line in done.stdout.splitlines() if "tcp://" in line]


def test_the_answer_is_exact_and_every_rank_is_shown(cluster: RunningCluster) -> None:
    assert cluster.complete(PROMPT, NEEDLE_TOKENS) == recall_oracle(PROMPT, NEEDLE_TOKENS)
    prefill = [["prefill-0", str(rank), "0", "0", str(rank % 2), str(rank // 2)] for rank in range(4)]
    decode = [["decode-0", str(rank), str(rank), "0", "0", "0"] for rank in range(2)]
    assert sorted(shown_ranks()) == sorted(prefill + decode)


@pytest.mark.full
@pytest.mark.parametrize("replica", ["prefill-0", "decode-0"])
def test_a_replica_comes_back_without_the_follower_it_lost(cluster: RunningCluster, replica: str) -> None:
    before = cluster.replicas()[replica]
    os.kill(listener_pid(before["rows"][-1]["address"]), signal.SIGKILL)

    def is_back() -> bool:
        entry = cluster.replicas().get(replica)
        return entry is not None and entry["ready"] and entry["incarnation"] > before["incarnation"]

    cluster.wait_until(is_back, 180)
    assert cluster.complete(PROMPT, NEEDLE_TOKENS) == recall_oracle(PROMPT, NEEDLE_TOKENS)
    cluster.wait_until(cluster.is_empty, 60)
