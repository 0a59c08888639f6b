"""Network cut during a handoff: its pages are quarantined for as long as bytes may arrive."""

import time
from collections.abc import Iterator

import pytest

from tests.chaos.host_loss import MARKS, cluster_over
from tests.chaos.slow_link import acknowledged, slow, unsent
from tests.chaos.streams import Crowd, Stream
from tests.chaos.two_hosts import RayNodes, cable, cut, ray_nodes
from tests.chaos.watch import RECOVERY_S, Before, metric
from tests.fakes.cluster import RunningCluster

pytestmark = MARKS

PATIENT_RAY = {"RAY_health_check_failure_threshold": "100", "RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
PATIENCE_S = 10.0
SETTINGS = (
    "resources.silence_s=300",
    f"transfer.transfer_timeout_s={PATIENCE_S:g}",
    "kv.memory_gib=0.06",
    "kv.page_size=512",
)
"""Settings with which decode outlives the cut, and has a small pool of large pages."""
RATE = "8mbit"
PROMPT_LEN, PAGES = 6000, 12
"""Prompt of 12 s on the slow link. Its pages fit into decode's quarantine limit."""
SEEN_S = 60.0
IN_WRITE = 64 << 10
"""Number of unsent bytes that only a Mooncake connection has."""
COMPUTED_S = 3.0
"""Time after the first bytes, when prefill has certainly reported that it has computed the prompt."""
CUT_S = 45.0
"""Duration longer than decode's timeout, and than Mooncake's, which gives a write up after 30 s."""
LATER, NUM_TOKENS = 8, 600
"""Clients that together need more pages than there are."""


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    with cable(), ray_nodes(num_cpus=2, num_away_cpus=1, env=PATIENT_RAY) as nodes:
        yield nodes


@pytest.fixture
def cluster(nodes: RayNodes) -> Iterator[RunningCluster]:
    with cluster_over(nodes, "test-cut-handoff", *SETTINGS) as running:
        yield running


def settle_s() -> float:
    from transfer.backends.mooncake import MooncakeBackend

    return MooncakeBackend.settle_s


def pages(cluster: RunningCluster, state: str) -> int:
    """Return the number of decode's pages in a state."""
    return metric(cluster, f'baton_replica_pages{{replica="decode-0",state="{state}"}}')


class CutHandoff:
    """Handoff whose write is interrupted by the cut. Times are in seconds since the cut."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self.stream = Stream(20, seed=1600, prompt_len=PROMPT_LEN)

    def run(self) -> None:
        """Cut the link for longer than Mooncake retries, restore it, and watch the kernel's unsent bytes drain."""
        wait_until = self._cluster.wait_until
        with slow(RATE), Crowd(self._cluster.url, [self.stream]):
            wait_until(lambda: unsent("established", IN_WRITE), SEEN_S)
            time.sleep(COMPUTED_S)
            self.before = Before(self._cluster, "decode-0")
            with cut() as self.proof:
                self.detection_s = self.before.wait_detected()
                wait_until(lambda: unsent("fin-wait-1", IN_WRITE), CUT_S)
                self.gave_up_s = self.before.passed_s
                time.sleep(max(0.0, CUT_S - self.before.passed_s))
                self.late = unsent("fin-wait-1", IN_WRITE)
        wait_until(lambda: not unsent("fin-wait-1", 0).keys() & self.late.keys(), SEEN_S)
        self.came_s = self.before.passed_s
        self.num_whole = len(acknowledged() & self.late.keys())
        self.recovery_s = self.before.wait_recovered(is_new=False)


def test_pages_of_an_interrupted_handoff_stay_quarantined_until_its_bytes_arrive(cluster: RunningCluster) -> None:
    handoff = CutHandoff(cluster)
    handoff.run()
    with Crowd.alike(cluster.url, LATER, NUM_TOKENS, seed=1700) as crowd:
        pass
    assert [stream.end for stream in crowd.streams] == ["right"] * LATER
    assert pages(cluster, "stopping") == PAGES
    before = handoff.before
    cluster.wait_until(lambda: pages(cluster, "quarantined") == PAGES, settle_s())
    quarantined_s = before.passed_s
    cluster.wait_until(lambda: pages(cluster, "stopping") == 0, RECOVERY_S)
    free_s = before.passed_s
    assert quarantined_s < free_s
    assert free_s > handoff.gave_up_s + settle_s()
    proof = (
        f"{handoff.proof}; Mooncake gave up after {handoff.gave_up_s:.1f} s, {sum(handoff.late.values())} bytes were "
        f"still in the kernel and had left it after {handoff.came_s:.1f} s; {handoff.num_whole} of {len(handoff.late)} "
        f"connections acknowledged all of theirs; {PAGES} pages were in quarantine "
        f"after {quarantined_s:.1f} s and free after {free_s:.1f} s"
    )
    everybody = Crowd(cluster.url, [handoff.stream, *crowd.streams])
    line = before.line(f"cut in a handoff, {CUT_S:g} s", everybody, proof, handoff.detection_s, handoff.recovery_s)
    assert Before(cluster, "decode-0").incarnations == before.incarnations
    assert (line.success, line.failed, line.hung, line.leaked_pages) == (LATER, 1, 0, 0)
