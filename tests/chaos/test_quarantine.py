"""A prefill rank is stopped in a handoff and is not considered lost: decode trades its pages for new memory."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.chaos.faults import state_of, stopped
from tests.chaos.host_loss import addresses
from tests.chaos.streams import Crowd, Stream
from tests.chaos.watch import Before, assert_all_right, pid_of
from tests.fakes.cluster import RunningCluster, running_cluster

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.full, pytest.mark.timeout(900)]

PATIENCE_S = 5.0
SETTINGS = (
    "resources.silence_s=600",  # nobody proves that the rank has stopped writing
    f"transfer.transfer_timeout_s={PATIENCE_S:g}",
    "kv.memory_gib=0.15",
)
BEGIN_S, END_S = 300.0, 120.0
CLIENTS, NUM_TOKENS = 4, 300
"""Streams that decode in the meantime."""
PROMPT_LEN, PAGE_SIZE = 40_000, 64


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running_cluster("deploy/local-cpu-2p2d.yaml", "test-quarantine", *SETTINGS) as running:
        yield running


def entry(cluster: RunningCluster, replica: str) -> dict[str, Any]:
    """Return a replica's table entry, or an empty one while it is missing."""
    return cluster.replicas().get(replica, {"incarnation": 0, "ranks": [], "load": Counter()})


def having(cluster: RunningCluster, role: str, what: Callable[[dict[str, int]], bool]) -> list[str]:
    """Return the replicas of a role whose load satisfies a condition."""
    replicas = cluster.replicas()
    return [name for name in replicas if name.startswith(role) and what(replicas[name]["load"])]


def has_long_prompt(load: dict[str, int]) -> bool:
    """Return whether more than half of the pages are in use."""
    return load["total_pages"] - load["free_pages"] > PROMPT_LEN // PAGE_SIZE // 2


def is_computing(load: dict[str, int]) -> bool:
    return load["num_running"] > 0


def test_pages_that_are_never_proven_free_are_given_up_with_their_replica(cluster: RunningCluster) -> None:
    others, victim = Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=2100), Stream(20, 2200, PROMPT_LEN)
    with others, ExitStack() as standing:
        cluster.wait_until(lambda: others.have_tokens(5), BEGIN_S)
        with Crowd(cluster.url, [victim]):
            cluster.wait_until(lambda: having(cluster, "prefill", is_computing), BEGIN_S)
            (decode,), (prefill,) = having(cluster, "decode", has_long_prompt), having(cluster, "prefill", is_computing)
            before, listened = Before(cluster, decode), addresses(cluster, decode)
            pid = pid_of(cluster, prefill, rank=1)
            proof = standing.enter_context(stopped(f"{prefill} rank 1", pid))
            cluster.wait_until(lambda: entry(cluster, decode)["load"]["stopping_pages"] > 0, END_S)
            detection_s = before.wait_detected()
            message = f"more than 25% of the pool: {prefill} did not confirm that writing has stopped"
            cluster.wait_until(lambda: message in cluster.terminal.output.replace("\n", ""), END_S)
            cluster.wait_until(lambda: entry(cluster, decode)["incarnation"] > before.incarnations[decode], END_S)
            assert state_of(pid) == "T"
            assert not {record["address"] for record in entry(cluster, decode)["ranks"]} & set(listened)
    recovery_s = before.wait_recovered()
    crowd = Crowd(cluster.url, [*others.streams, victim])
    line = before.line("quarantine beyond the limit", crowd, proof, detection_s, recovery_s)
    assert_all_right(cluster, line, crowd)
    assert (line.retries or 0) > 0
    after = Before(cluster, decode).incarnations
    assert {name for name in after if after[name] != before.incarnations[name]} == {decode}
