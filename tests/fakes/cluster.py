"""A whole cluster as a user starts it, for tests through the HTTP API."""

import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx

from tests.terminal import Terminal

CTRL_C = b"\x03"
START_S = 240.0
STOP_S = 60.0
LOWEST_PORT = 20_000
"""Ray's workers use the ports below."""
IS_UP = "stops the cluster"
"""Text that appears once every replica is ready. Before it, a failed replica ends the cluster."""
CLUSTER = "BATON_TEST_CLUSTER"
"""Variable with the cluster's name in the environment of each of its processes."""
BATON = (str(Path(sys.executable).with_name("baton")),)


class RunningCluster:
    """Cluster as clients and operators see it."""

    def __init__(self, url: str, terminal: Terminal, name: str = "") -> None:
        self.url = url
        self.name = name
        self.terminal = terminal

    def table(self) -> dict[str, Any]:
        """Return the bootstrap table as the router sees it."""
        table: dict[str, Any] = httpx.get(f"{self.url}/cluster", timeout=60).raise_for_status().json()
        return table

    def replicas(self) -> dict[str, dict[str, Any]]:
        """Return the table's entries by replica name."""
        return {entry["replica"]: entry for entry in self.table()["replicas"]}

    def is_empty(self) -> bool:
        """Return whether no replica holds a request or a page."""
        loads = [entry["load"] for entry in self.replicas().values()]
        return all(
            load["free_pages"] == load["total_pages"] > 0 and load["num_waiting"] == load["num_running"] == 0
            for load in loads
        )

    def wait_until(self, condition: Any, timeout_s: float) -> float:
        """Wait for a condition. Return the seconds it took."""
        start_s = time.monotonic()
        self.terminal.wait_until(condition, timeout_s)
        return time.monotonic() - start_s

    def stop(self) -> None:
        """Press Ctrl-C. The exit code must be 0."""
        self.terminal.press(CTRL_C)
        assert self.terminal.wait(STOP_S) == 0, self.terminal.screen

    def complete(self, prompt: list[int], max_tokens: int, **fields: Any) -> list[int]:
        """Return the greedy output token ids of a completion."""
        body = {
            "model": "recall",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=600)
        assert answer.status_code == 200, answer.text
        token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return token_ids


def up_command(
    deploy: str, name: str, port: int, *settings: str, arguments: Sequence[str] = (), program: Sequence[str] = BATON
) -> list[str]:
    """Return the ``baton up`` command for a modified deploy file."""
    command = [*program, "up", deploy, *arguments]
    for change in (f"name={name}", f"router.port={port}", *settings):
        command += ["--set", change]
    return command


@contextmanager
def running_cluster(
    deploy: str,
    name: str,
    *settings: str,
    arguments: Sequence[str] = (),
    program: Sequence[str] = BATON,
    env: Mapping[str, str] | None = None,
    port: int | None = None,
    end: Callable[[RunningCluster], None] = lambda cluster: cluster.stop(),
) -> Iterator[RunningCluster]:
    """Run ``baton up`` on a terminal, and end it on leaving the context, by default in order."""
    port = port or free_port()
    command = up_command(deploy, name, port, *settings, arguments=arguments, program=program)
    with Terminal(command, {**(env or {}), CLUSTER: name}) as terminal:
        cluster = RunningCluster(f"http://127.0.0.1:{port}", terminal, name)
        terminal.wait_until(lambda: IS_UP in terminal.output, START_S)
        yield cluster
        end(cluster)


def is_ready(url: str) -> bool:
    """Return whether a ready router answers at the URL."""
    return answers(f"{url}/ready")


def answers(url: str) -> bool:
    """Return whether a GET succeeds."""
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def free_port() -> int:
    """Return a port without a listener, below the kernel's own range, so that no other process gets it by chance."""
    first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.choice(range(LOWEST_PORT, first_of_kernel))
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def listener_pid(address: str) -> int:
    """Return the only process that listens at ``tcp://host:port``, from the kernel's socket table."""
    pids = listener_pids(address)
    assert pids, f"nobody listens at {address}"
    return min(pids)


def listener_pids(address: str) -> set[int]:
    """Return every process that listens at an address on this machine."""
    names = {f"socket:[{inode}]" for inode in _listening_inodes(address)}
    return {int(folder.name) for folder in Path("/proc").glob("[0-9]*") if names & {*open_files(int(folder.name))}}


def listened_hosts(pids: Iterable[int]) -> set[str]:
    """Return the IPv4 and IPv6 addresses at which any of these processes listens."""
    files = {name for pid in pids for name in open_files(pid)}
    ends = [fields[1] for fields in _listening() if f"socket:[{fields[9]}]" in files]
    return {_host(end.partition(":")[0]) for end in ends}


def is_listened(address: str) -> bool:
    """Return whether any process on this machine listens at the port of ``tcp://host:port``."""
    return bool(_listening_inodes(address))


def _listening_inodes(address: str) -> set[str]:
    port = f"{int(address.rpartition(':')[2]):04X}"
    return {fields[9] for fields in _listening() if fields[1].endswith(f":{port}")}


def _listening() -> list[list[str]]:
    return [fields for fields in tcp_sockets() if fields[3] == "0A"]


def tcp_sockets() -> list[list[str]]:
    """Return the fields of each line in the kernel's socket tables."""
    lines = [line for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    return [line.split() for line in lines]


def open_files(pid: int) -> list[str]:
    """Return the target of each of a process's descriptors. Empty if it has ended, or belongs to another user."""
    names = []
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                names.append(str(link.readlink()))
    return names


def _host(words: str) -> str:
    """Return an address in the tables as text. Its words of 32 bits are in this machine's byte order."""
    packed = b"".join(int(words[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(words), 8))
    address = ip_address(packed)
    return str(getattr(address, "ipv4_mapped", None) or address)
