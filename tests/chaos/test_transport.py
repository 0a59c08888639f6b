"""Faulty pages and messages under a CPU's default checks: nobody gets a wrong token or waits."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.faulty_cluster import faulty_cluster
from tests.chaos.faulty_worker import DELAY_S, Fault, order, proofs
from tests.chaos.streams import Crowd
from tests.chaos.watch import Before, assert_all_right
from tests.fakes.cluster import RunningCluster

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.full, pytest.mark.timeout(900)]

CLIENTS = 4
TIMES = 2
SETTINGS = ("kv.memory_gib=0.25", "transfer.transfer_timeout_s=6")
DONE_S = 60.0
TOLD_S = 10.0
"""Limit for reports, which leaders send with their heartbeats."""
ELSEWHERE = (Fault.HANG, Fault.ZERO)
"""Faults that are not between prefill and decode, or between decode and router."""
CHANGES_PAGES = (Fault.DROP, Fault.TRUNCATE, Fault.FLIP)


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[RunningCluster]:
    with faulty_cluster(folder, "test-chaos-transport", *SETTINGS) as running:
        yield running


def num_wrong_pages(cluster: RunningCluster) -> int:
    """Return the number of pages that decode has found corrupted."""
    return int(cluster.replicas()["decode-0"]["load"]["wrong_pages"])


def num_dropped(cluster: RunningCluster) -> int:
    """Return the number of notifications that decode has dropped as duplicates."""
    return int(cluster.replicas()["decode-0"]["load"]["dropped"].get("Done", 0))


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault not in ELSEWHERE])
def test_faulty_transfers_are_detected(cluster: RunningCluster, folder: Path, fault: Fault) -> None:
    before, seen, wrong = Before(cluster, "decode-0"), len(proofs(folder)), num_wrong_pages(cluster)
    dropped = num_dropped(cluster)
    order(folder, fault, TIMES)
    seed = 1400 + 10 * list(Fault).index(fault)
    with Crowd.alike(cluster.url, CLIENTS, 20, seed=seed, prompt_len=4000) as crowd:
        cluster.wait_until(lambda: len(proofs(folder)) == seen + TIMES, DONE_S)
    recovery_s = before.wait_recovered(is_new=False)
    if fault in CHANGES_PAGES:
        cluster.wait_until(lambda: num_wrong_pages(cluster) > wrong, TOLD_S)
    if fault is Fault.REPEAT:  # the last third copy is sent with a notification that may not follow
        cluster.wait_until(lambda: num_dropped(cluster) >= dropped + 2 * TIMES - 1, TOLD_S)
    found = num_wrong_pages(cluster) - wrong
    proof = f"{proofs(folder)[-1]}; injected {TIMES} times; wrong pages found: {found}"
    proof += f"; notifications dropped: {num_dropped(cluster) - dropped}"
    line = before.line(f"transport: {fault}", crowd, proof, None, recovery_s)
    assert_all_right(cluster, line, crowd)
    assert fault in CHANGES_PAGES or found == 0
    assert ((line.retries or line.continuations or 0) > 0) == (fault not in (Fault.DELAY, Fault.REPEAT))
    assert recovery_s > DELAY_S or fault is not Fault.DELAY
