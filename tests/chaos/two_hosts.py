"""Two hosts on one machine: a second network namespace behind a veth pair, and a Ray node on each side."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.fakes.cluster import free_port

HOME, AWAY = "10.231.77.1", "10.231.77.2"
SPACE, HOME_END, AWAY_END = "baton-away", "baton-h", "baton-a"
START_S = 120.0
END_S = 30.0


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


@contextmanager
def cable() -> Iterator[None]:
    """Create the other host, reachable from this one. Requires root."""
    if SPACE in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=False).stdout:
        # A run that was killed left it.
        _ip("link", "del", HOME_END)
        _ip("netns", "del", SPACE)
    _ip("netns", "add", SPACE)
    try:
        _ip("link", "add", HOME_END, "type", "veth", "peer", "name", AWAY_END, "netns", SPACE)
        _ip("addr", "add", f"{HOME}/24", "dev", HOME_END)
        _ip("link", "set", HOME_END, "up")
        for command in (
            ["addr", "add", f"{AWAY}/24", "dev", AWAY_END],
            ["link", "set", AWAY_END, "up"],
            ["link", "set", "lo", "up"],
        ):
            _ip("-n", SPACE, *command)
        yield
        # A namespace outlives its name for a while, and the link with it.
        _ip("link", "del", HOME_END)
    finally:
        _ip("netns", "del", SPACE)


@contextmanager
def cut() -> Iterator[str]:
    """Cut the link between the hosts. Yield the proof."""
    _ip("-n", SPACE, "link", "set", AWAY_END, "down")
    try:
        with socket.socket() as probe:
            probe.settimeout(0.5)
            try:
                probe.connect((AWAY, 1))
            except ConnectionRefusedError:
                raise AssertionError(f"{AWAY} still answers") from None
            except OSError as error:
                yield f"{AWAY} cannot be reached: {type(error).__name__}"
    finally:
        _ip("-n", SPACE, "link", "set", AWAY_END, "up")


def away_pid(address: str) -> int:
    """Return the process that listens at ``tcp://host:port`` on the other host."""
    shown = _listeners_away(address)
    found = re.search(r"pid=(\d+)", shown)
    assert found, f"nobody listens at {address}: {shown}"
    return int(found[1])


def is_listened_away(address: str) -> bool:
    """Return whether a process on the other host listens at the address."""
    return bool(_listeners_away(address))


def _listeners_away(address: str) -> str:
    look = ["ip", "netns", "exec", SPACE, "ss", "-Hltnp", f"sport = :{address.rpartition(':')[2]}"]
    return subprocess.run(look, capture_output=True, text=True, check=True).stdout


def away_pids(name: str) -> list[int]:
    """Return the processes with this name on the other host."""
    shown = subprocess.run(["ip", "netns", "pids", SPACE], capture_output=True, text=True, check=True).stdout
    return [pid for pid in map(int, shown.split()) if Path(f"/proc/{pid}/comm").read_text() == f"{name}\n"]


class RayNodes:
    """Ray cluster whose nodes end with the context of ``ray_nodes``."""

    def __init__(self, stack: ExitStack, folder: Path, env: Mapping[str, str]) -> None:
        self._stack, self._folder, self._env = stack, folder, env
        self.address, self._client_port = f"{HOME}:{free_port()}", free_port()
        self._num_nodes = 0

    def start_head(self, num_cpus: int) -> None:
        port = self.address.rpartition(":")[2]
        head = ["--head", f"--port={port}", f"--ray-client-server-port={self._client_port}"]
        head += [f"--temp-dir={self._folder}", "--include-dashboard=false"]
        self._start([], HOME, num_cpus, head)

    def start(self, host: str, num_cpus: int) -> None:
        before = ["ip", "netns", "exec", SPACE] if host == AWAY else []
        self._start(before, host, num_cpus, [f"--address={self.address}"])

    def _start(self, before: Sequence[str], host: str, num_cpus: int, arguments: Sequence[str]) -> None:
        self._num_nodes += 1
        log = Path(self._folder, f"node-{self._num_nodes}.log")
        own = [f"--node-ip-address={host}", f"--num-cpus={num_cpus}"]
        self._stack.enter_context(_node(before, [*arguments, *own], log, self._env))


@contextmanager
def ray_nodes(num_cpus: int, num_away_cpus: int, env: Mapping[str, str] | None = None) -> Iterator[RayNodes]:
    """Run a Ray node on each host, with changes to Ray's settings."""
    with tempfile.TemporaryDirectory(prefix="br-", dir="/tmp") as folder, ExitStack() as stack:
        nodes = RayNodes(stack, Path(folder), env or {})
        nodes.start_head(num_cpus)
        nodes.start(AWAY, num_away_cpus)
        yield nodes


@contextmanager
def _node(before: Sequence[str], arguments: Sequence[str], log: Path, env: Mapping[str, str]) -> Iterator[None]:
    """Run ``ray start`` in a context. On exit, end everything that it started."""
    ray = str(Path(sys.executable).with_name("ray"))
    command = [*before, ray, "start", "--block", "--disable-usage-stats", "--dashboard-agent-listen-port=0", *arguments]
    environ = {**os.environ, "RAY_AUTH_MODE": "disabled", **env}
    with log.open("w") as output:
        node = subprocess.Popen(command, start_new_session=True, env=environ, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_up(node, log)
        yield
    finally:
        node.terminate()
        try:
            node.wait(END_S)
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()


def _wait_up(node: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while "Ray runtime started" not in log.read_text():
        assert node.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.1)
