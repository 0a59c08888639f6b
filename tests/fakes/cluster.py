"""A whole cluster as a user starts it, for tests that go through the endpoint."""

import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.terminal import Terminal

CTRL_C = b"\x03"
START_S = 240.0
STOP_S = 60.0


class RunningCluster:
    """What a client and an operator see of it."""

    def __init__(self, url: str, terminal: Terminal) -> None:
        self.url = url
        self.terminal = terminal

    def table(self) -> dict[str, Any]:
        """The bootstrap table as the router sees it."""
        table: dict[str, Any] = httpx.get(f"{self.url}/cluster", timeout=60).raise_for_status().json()
        return table

    def replicas(self) -> dict[str, dict[str, Any]]:
        """Entries of the table by replica name."""
        return {entry["replica"]: entry for entry in self.table()["replicas"]}

    def is_empty(self) -> bool:
        """No request and no page is held on any replica."""
        loads = [entry["load"] for entry in self.replicas().values()]
        return all(
            load["free_pages"] == load["total_pages"] > 0 and load["num_waiting"] == load["num_running"] == 0
            for load in loads
        )

    def wait_until(self, condition: Any, timeout_s: float) -> float:
        """Seconds until the condition held."""
        start_s = time.monotonic()
        self.terminal.wait_until(condition, timeout_s)
        return time.monotonic() - start_s

    def complete(self, prompt: list[int], max_tokens: int, **fields: Any) -> list[int]:
        """Greedy output token ids of one completion."""
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


@contextmanager
def running_cluster(deploy: str, name: str, *settings: str, arguments: Sequence[str] = ()) -> Iterator[RunningCluster]:
    """``baton up`` on a terminal until Ctrl-C; it must exit with 0."""
    port = _free_port()
    changes = [f"name={name}", f"router.port={port}", *settings]
    command = [str(Path(sys.executable).with_name("baton")), "up", deploy, *arguments]
    for change in changes:
        command += ["--set", change]
    with Terminal(command) as terminal:
        cluster = RunningCluster(f"http://127.0.0.1:{port}", terminal)
        terminal.wait_until(lambda: is_ready(cluster.url), START_S)
        yield cluster
        terminal.press(CTRL_C)
        assert terminal.wait(STOP_S) == 0, terminal.output


def is_ready(url: str) -> bool:
    """Whether a router answers there that it takes requests."""
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def listener_pid(address: str) -> int:
    """The process of this machine that listens at ``tcp://host:port``, from the kernel's socket table."""
    port = f"{int(address.rpartition(':')[2]):04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (inode,) = {fields[9] for fields in lines if fields[1].endswith(f":{port}") and fields[3] == "0A"}
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):
            if any(link.readlink().name == f"socket:[{inode}]" for link in folder.iterdir()):
                return int(folder.parent.name)
    raise AssertionError(f"nobody listens at {address}")
