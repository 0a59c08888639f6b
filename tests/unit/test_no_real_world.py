"""The guard of unit tests: each way to the outside world raises."""

import socket
import subprocess
import sys

import pytest
import torch
import zmq

from cluster.ray_system.environ import set_for_own_cluster
from tests.unit.conftest import ReachedOutsideError

# Ray reads its environment once, on import. Other tests of this process start a cluster with it.
set_for_own_cluster()

# A machine for GPU tests does not need Ray.
ray = pytest.importorskip("ray")


def test_sockets() -> None:
    with socket.socket() as sock:
        for reach in (sock.bind, sock.connect, sock.connect_ex):
            with pytest.raises(ReachedOutsideError, match="a unit test called socket"):
                reach(("127.0.0.1", 0))
    with pytest.raises(ReachedOutsideError, match="getaddrinfo"):
        socket.getaddrinfo("localhost", 80)


def test_zmq() -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as sock, pytest.raises(ReachedOutsideError):
        sock.bind_to_random_port("tcp://127.0.0.1")


def test_ray() -> None:
    with pytest.raises(ReachedOutsideError, match=r"ray\.init"):
        ray.init()


@pytest.mark.parametrize("command", [["ray", "start"], "/opt/venv/bin/ray stop", ["/x/raylet"]])
def test_processes_of_ray(command: str | list[str]) -> None:
    with pytest.raises(ReachedOutsideError, match="subprocess"):
        subprocess.Popen(command)


def test_other_processes_are_allowed() -> None:
    assert subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, check=True).stdout == b"7\n"


def test_cuda() -> None:
    with pytest.raises(ReachedOutsideError, match="cuda"):
        torch.cuda.init()  # type: ignore[no-untyped-call]
