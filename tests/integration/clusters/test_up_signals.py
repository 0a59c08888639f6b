"""Signals to `baton up` at any time: the driver stops its cluster in order and leaves nothing behind.

Clusters of other tests end by other signals, those in tests/fakes/cluster_ends.py.
"""

import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select

import pytest

from tests.fakes.cluster import CTRL_C, IS_UP, START_S, STOP_S, free_port, is_listened, up_command
from tests.fakes.cluster_ends import kill_daemon, ray_folders
from tests.leftovers import find_processes
from tests.terminal import Terminal

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

MARK = "BATON_TEST_UP"
SMALL = ("kv.memory_gib=0.05", "prefill.parallel.cp=1")
HEAD_GONE_S = 30.0
AT_ONCE_S = 14.0
"""Limit that is shorter than the wait of an orderly stop for an unresponsive Ray."""


@contextmanager
def up(name: str, notes: Path, *options: str) -> Iterator[Terminal]:
    """Run ``baton up``. At the end, none of its processes, notes and folders may remain."""
    with Terminal(_up_command(name, *options), {MARK: name, "XDG_RUNTIME_DIR": str(notes)}) as terminal:
        yield terminal
        assert find_processes(MARK, name) == []
        assert [path for path in notes.rglob("*") if path.is_file()] == []
        assert ray_folders(terminal) == []


def _up_command(name: str, *options: str) -> list[str]:
    return [*up_command("deploy/local-cpu.yaml", name, 0, *SMALL), *options]


def test_a_second_ctrl_c_stops_at_once_even_when_ray_has_died(tmp_path: Path) -> None:
    with up("test-twice", tmp_path) as terminal:
        terminal.wait_until(lambda: IS_UP in terminal.output, START_S)
        terminal.press(CTRL_C)
        terminal.wait_until(lambda: "draining" in terminal.output, STOP_S)
        kill_daemon("gcs_server", terminal.pid)
        terminal.press(CTRL_C)
        assert terminal.wait(AT_ONCE_S) == 0, terminal.screen


def test_ctrl_c_twice_while_ray_starts(tmp_path: Path) -> None:
    with up("test-early", tmp_path) as terminal:
        terminal.wait_until(lambda: ray_folders(terminal) != [], START_S)
        for _ in range(2):
            time.sleep(0.5)  # any point in Ray's start
            terminal.press(CTRL_C)
        assert terminal.wait(STOP_S + START_S) == 128 + signal.SIGINT, terminal.screen
        assert "SIGINT: stopping once Ray has started" in terminal.output
        assert terminal.output.rstrip().endswith("stopped while starting")


def test_a_second_ctrl_c_is_final_while_a_ray_to_join_does_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with up("test-deaf", tmp_path, "--address", address) as terminal:
            terminal.wait_until(lambda: select([deaf], [], [], 0)[0] != [], START_S)
            for _ in range(2):
                time.sleep(1.0)  # any point in Ray's retries
                terminal.press(CTRL_C)
            assert terminal.wait(AT_ONCE_S) == 128 + signal.SIGINT, terminal.screen


def test_the_death_of_rays_head_ends_the_driver_with_an_error(tmp_path: Path) -> None:
    with up("test-gcs", tmp_path) as terminal:
        terminal.wait_until(lambda: IS_UP in terminal.output, START_S)
        kill_daemon("gcs_server", terminal.pid)
        assert terminal.wait(STOP_S) == 1, terminal.screen
        assert terminal.output.rstrip().splitlines()[-1].startswith("error: Ray's head node at 127.0.0.1:")


@pytest.mark.full
def test_the_death_of_the_head_of_a_joined_ray_ends_the_driver_with_an_error(tmp_path: Path) -> None:
    port, head_port, env = free_port(), free_port(), {"RAY_AUTH_MODE": "disabled"}
    address = f"127.0.0.1:{head_port}"
    options = ["--num-cpus=4", "--disable-usage-stats", "--include-dashboard=false", "--dashboard-agent-listen-port=0"]
    program = str(Path(sys.executable).with_name("ray"))
    with tempfile.TemporaryDirectory(prefix="br-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        start = [program, "start", "--head", "--block", f"--port={head_port}", f"--temp-dir={folder}", *options]
        with Terminal(start, env) as head:
            head.wait_until(lambda: is_listened(f"tcp://{address}"), START_S)
            command = up_command("deploy/local-cpu.yaml", "test-joined", port, *SMALL, arguments=["--address", address])
            with Terminal(command, {**env, "XDG_RUNTIME_DIR": str(tmp_path)}) as terminal:
                terminal.wait_until(lambda: IS_UP in terminal.output, START_S)
                kill_daemon("gcs_server", head.pid)
                assert terminal.wait(STOP_S + HEAD_GONE_S) == 1, terminal.screen
                # The command `ray start` ends its raylet too.
                assert re.search(r"error: (Ray's head node at|the raylet of this machine)", terminal.output)
                assert not is_listened(f"tcp://127.0.0.1:{port}")
