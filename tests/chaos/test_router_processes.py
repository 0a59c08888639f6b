"""Two router processes on real Ray: one of them dies, and its port goes on answering."""

from collections.abc import Iterator

import httpx
import pytest

from tests.chaos.faults import kill
from tests.chaos.streams import Stream
from tests.chaos.watch import RECOVERY_S
from tests.fakes.cluster import RunningCluster, listener_pids, running_cluster

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.full, pytest.mark.timeout(900)]

NUM_TRIES = 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running_cluster(
        "deploy/local-cpu-cp1.yaml", "test-chaos-routers", "kv.memory_gib=0.25", "router.processes=2"
    ) as running:
        yield running


def assert_all_serve(cluster: RunningCluster) -> None:
    """Whichever process the connections go to."""
    for seed in range(NUM_TRIES):
        stream = Stream(3, seed=seed)
        stream.run(cluster.url)
        assert stream.end == "right", f"{stream.end}\n{cluster.terminal.output}"


def test_one_of_two_is_killed(cluster: RunningCluster) -> None:
    before = listener_pids(cluster.url)
    assert len(before) == 2
    assert_all_serve(cluster)
    finished = 'baton_request_ended_total{outcome="finished"}'
    text = httpx.get(f"{cluster.url}/metrics", timeout=60, trust_env=False).text
    assert finished in text
    kill("a router process", min(before))
    cluster.wait_until(lambda: min(before) not in listener_pids(cluster.url), RECOVERY_S)
    assert_all_serve(cluster)
    cluster.wait_until(lambda: len(listener_pids(cluster.url)) == 2, RECOVERY_S)
    assert_all_serve(cluster)
