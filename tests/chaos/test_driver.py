"""The driver ends under load, killed or on request: nothing remains of its cluster, and the next one serves."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.cli.running import find_running
from tests.chaos.faults import kill
from tests.chaos.report import report
from tests.chaos.streams import Crowd, Stream
from tests.fakes.cluster import (
    IS_UP,
    START_S,
    STOP_S,
    RunningCluster,
    free_port,
    is_listened,
    running_cluster,
    up_command,
)
from tests.leftovers import find_processes
from tests.terminal import Terminal

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.full, pytest.mark.timeout(900)]

NAME = "test-chaos-driver"
DEPLOY = "deploy/local-cpu.yaml"
SMALL = "kv.memory_gib=0.25"
MARK = "BATON_TEST_DRIVER"
CLIENTS = 4
NUM_TOKENS, MANY_TOKENS = 300, 1200
"""Answer lengths that take longer than the end of the cluster."""
BEGIN_S = 300.0


@contextmanager
def doomed_cluster(port: int) -> Iterator[RunningCluster]:
    """Run a cluster that Ctrl-C does not end. When the context ends, all of it must be gone."""
    shared_before = set(Path("/dev/shm").iterdir())
    with Terminal(up_command(DEPLOY, NAME, port, SMALL), {MARK: NAME}) as terminal:
        terminal.wait_until(lambda: IS_UP in terminal.output, START_S)
        cluster = RunningCluster(f"http://127.0.0.1:{port}", terminal)
        addresses = [record["address"] for entry in cluster.replicas().values() for record in entry["ranks"]]
        addresses += [cluster.url, str(find_running(NAME).bootstrap_url)]
        yield cluster
        wait_for(lambda: find_processes(MARK, NAME) == [])
        assert not any(is_listened(address) for address in addresses)
        assert set(Path("/dev/shm").iterdir()) <= shared_before
        assert not list(Path("/tmp").glob(f"baton-ray-{terminal.pid}-*"))


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for a condition, whether or not the terminal still runs."""
    deadline_s = time.monotonic() + STOP_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def write_line(scenario: str, port: int, crowd: Crowd, proof: str, fault_s: float, gone_s: float) -> None:
    """Start a cluster again with the same port and name, and record how long it took."""
    with running_cluster(DEPLOY, NAME, SMALL, port=port) as cluster:
        recovery_s = time.monotonic() - fault_s
        stream = Stream(20, seed=2)
        stream.run(cluster.url)
        assert stream.end == "right", stream.end
        report(scenario, cluster, crowd, proof, detection_s=gone_s, recovery_s=recovery_s)


def test_the_driver_is_killed() -> None:
    port = free_port()
    with doomed_cluster(port) as cluster, Crowd.alike(cluster.url, CLIENTS, MANY_TOKENS, seed=1200) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(5), BEGIN_S)
        fault_s = time.monotonic()
        proof = kill("driver", cluster.terminal.pid)
    gone_s = time.monotonic() - fault_s
    ends = [stream.end for stream in crowd.streams]
    assert crowd.count("failed") > 0, ends
    assert crowd.count("failed") + crowd.count("right") == CLIENTS, ends
    write_line("kill the driver", port, crowd, f"{proof}, and so is everything it had started", fault_s, gone_s)


def test_the_driver_is_asked_to_stop() -> None:
    port = free_port()
    with doomed_cluster(port) as cluster, Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=1300) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(5), BEGIN_S)
        fault_s = time.monotonic()
        os.kill(cluster.terminal.pid, signal.SIGTERM)
        assert cluster.terminal.wait(STOP_S) == 0, cluster.terminal.screen
        assert "drained: stopping" in cluster.terminal.output
    gone_s = time.monotonic() - fault_s
    assert crowd.count("right") == CLIENTS, [stream.end for stream in crowd.streams]
    proof = (
        f"SIGTERM: process {cluster.terminal.pid} (driver) drained and exited with code 0; all it had started is gone"
    )
    write_line("SIGTERM to the driver", port, crowd, proof, fault_s, gone_s)
