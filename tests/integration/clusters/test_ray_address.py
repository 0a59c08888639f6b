"""Addresses without a Ray cluster: `baton up` fails soon, with one line."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

SOON_S = 60.0
"""Limit in seconds. Ray itself would try for ten minutes."""


def up(notes: Path, *options: str, address: str = "") -> tuple[int, str]:
    """Return exit code and standard error of ``baton up`` with RAY_ADDRESS set, if it ends in time."""
    command = [str(Path(sys.executable).with_name("baton")), "up", "deploy/local-cpu.yaml", "--set", "router.port=0"]
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(notes), "RAY_ADDRESS": address}
    ended = subprocess.run(
        [*command, *options], env=environ, capture_output=True, text=True, timeout=SOON_S, check=False
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("form", "is_option"), [("127.0.0.1:{}", True), ("localhost:{}", False), ("ray://127.0.0.1:{}", True)]
)
def test_an_address_without_a_listener_is_refused_quickly(form: str, is_option: bool, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        address = form.format(taken.getsockname()[1])
    code, output = up(tmp_path, "--address", address) if is_option else up(tmp_path, address=address)
    line = output.splitlines()[-1]
    assert code == 2
    assert line.startswith(f"Ray at {address} cannot be used: ")
    assert line.endswith("Connection refused; allowed: host:port of a running Ray head node, or auto")


def test_an_invalid_address_is_refused(tmp_path: Path) -> None:
    code, output = up(tmp_path, "--address", "somewhere")
    assert code == 2
    assert output.splitlines()[-1].startswith("Ray at somewhere cannot be used: ")
