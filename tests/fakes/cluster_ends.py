"""Ends of a running cluster other than Ctrl-C, each for a cluster that some test needs anyway."""

import os
import re
import signal
import time
from pathlib import Path

from cluster.cli.running import control_path
from cluster.processes import GONE
from tests.fakes.cluster import CLUSTER, STOP_S, RunningCluster
from tests.leftovers import find_processes
from tests.terminal import Terminal


def signal_its_group(cluster: RunningCluster) -> None:
    """End a cluster as a closed terminal or a job manager does. Ray's daemons must not die before the workers."""
    terminal = cluster.terminal
    os.killpg(terminal.pid, signal.SIGTERM)
    assert terminal.wait(STOP_S) == 0, terminal.screen
    assert "drained: stopping" in terminal.output
    assert "SIGTERM received at" not in terminal.output
    assert find_processes(CLUSTER, cluster.name) == []
    assert _files_of(cluster) == []


def kill_its_raylet(cluster: RunningCluster) -> None:
    """Kill Ray's daemon of this machine. The driver must end with an error; in some cases, Ray ends it at once."""
    terminal = cluster.terminal
    kill_daemon("raylet", terminal.pid)
    assert terminal.wait(STOP_S) == 1, terminal.screen
    terminal.wait_until(lambda: "error: " in terminal.output, STOP_S)
    own = "the raylet of this machine has died, and with it all processes of the cluster here"
    last = terminal.output.rstrip().splitlines()[-1]
    assert last.startswith((f"error: {own}", f"error: {GONE}")), terminal.screen
    assert find_processes(CLUSTER, cluster.name) == []
    assert _files_of(cluster) == []


def kill_its_driver(cluster: RunningCluster) -> None:
    """Kill the driver. All other processes must end, and only the driver's own note and socket remain."""
    os.kill(cluster.terminal.pid, signal.SIGKILL)
    assert cluster.terminal.wait(STOP_S) == -signal.SIGKILL
    cluster.terminal.wait_until(lambda: f"error: {GONE}" in cluster.terminal.output, STOP_S)
    deadline_s = time.monotonic() + STOP_S
    while left := find_processes(CLUSTER, cluster.name):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)
    assert [path for path in Path("/dev/shm").iterdir() if re.search("baton|plasma|ray", path.name)] == []
    assert ray_folders(cluster.terminal) == []
    for path in _files_of(cluster):
        path.unlink()


def kill_daemon(name: str, parent: int) -> None:
    """Kill a daemon of Ray that a process has started."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        fields = stat.read_text().split()
        if fields[1] == f"({name})" and int(fields[3]) == parent:
            os.kill(int(fields[0]), signal.SIGKILL)


def ray_folders(terminal: Terminal) -> list[Path]:
    """Return the folders that ``baton up`` creates just before Ray starts."""
    return list(Path("/tmp").glob(f"baton-ray-{terminal.pid}-*"))


def _files_of(cluster: RunningCluster) -> list[Path]:
    return [*ray_folders(cluster.terminal), *control_path(cluster.name).parent.glob(f"{cluster.name}.*")]
