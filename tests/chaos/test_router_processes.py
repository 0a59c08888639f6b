"""Two router processes on real Ray: one of them dies under load, and its port keeps answering."""

from collections.abc import Iterator

import httpx
import pytest

from tests.chaos.faults import kill
from tests.chaos.streams import Crowd, Stream
from tests.chaos.watch import RECOVERY_S, Before
from tests.fakes.cluster import RunningCluster, listener_pids, running_cluster

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.full, pytest.mark.timeout(900)]

NUM_TRIES = 20
CLIENTS = 12
"""Enough clients that the kernel, which distributes connections at random, does not give all to one process."""
NUM_TOKENS = 300
BEGIN_S = 300.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running_cluster(
        "deploy/local-cpu-cp1.yaml", "test-chaos-routers", "kv.memory_gib=0.25", "router.processes=2"
    ) as running:
        yield running


def assert_all_serve(cluster: RunningCluster) -> None:
    """Check that both processes answer requests."""
    for seed in range(NUM_TRIES):
        stream = Stream(3, seed=seed)
        stream.run(cluster.url)
        assert stream.end == "right", f"{stream.end}\n{cluster.terminal.screen}"


def test_one_of_two_is_killed(cluster: RunningCluster) -> None:
    routers = listener_pids(cluster.url)
    assert len(routers) == 2
    assert_all_serve(cluster)
    finished = 'baton_request_ended_total{outcome="finished"}'
    assert finished in httpx.get(f"{cluster.url}/metrics", timeout=60, trust_env=False).text
    with Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=2600) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(5), BEGIN_S)
        before = Before(cluster, "decode-0")
        proof = kill("one of two routers", min(routers))
        cluster.wait_until(lambda: min(routers) not in listener_pids(cluster.url), RECOVERY_S)
        assert_all_serve(cluster)
        cluster.wait_until(lambda: len(listener_pids(cluster.url)) == 2, RECOVERY_S)
        recovery_s = before.passed_s
    line = before.line("kill one of two routers", crowd, proof, None, recovery_s)
    ends = [stream.end for stream in crowd.streams]
    assert min(line.success, line.failed) > 0, ends
    assert line.success + line.failed == CLIENTS, ends
    assert (line.hung, line.leaked_pages) == (0, 0)
    assert_all_serve(cluster)
