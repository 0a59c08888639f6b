"""Released clients, each installed in an environment of its own, against a whole cluster."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clients.demo import ANSWER, LATE_S
from tests.clients.table import CLIENTS, ROWS, Client, row_of
from tests.fakes.cluster import RunningCluster, running_cluster
from tests.fakes.model_folder import write_model_folder
from tests.fakes.router_cluster import RouterCluster, run_cluster
from tests.readme import ROOT
from workers.models.recall import build_recall_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1200)]

INSTALL_S = 600
CHECK_S = 300
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Variables without which clients fetch what they do not need."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running_cluster("deploy/local-cpu.yaml", "clients", "kv.memory_gib=0.25") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "recall"
    build_recall_checkpoint(folder)
    return folder


@pytest.fixture
def python(client: Client, tmp_path: Path) -> Iterator[str]:
    """Yield the Python of a new environment with the client. Remove it afterwards, as some take a gigabyte."""
    environment = tmp_path / "environment"
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    try:
        with recorded(client):
            _run([sys.executable, "-m", "venv", str(environment)], INSTALL_S)
            if client.others:
                _run([*pip, *client.others], INSTALL_S)
            _run([*pip, *(["--no-deps"] if client.is_alone else []), client.package], INSTALL_S)
        yield python
    finally:
        shutil.rmtree(environment, ignore_errors=True)


@pytest.fixture
def late_router(tmp_path: Path) -> Iterator[RouterCluster]:
    """Yield a router whose replicas answer nothing until some time after the first request."""
    for router in run_cluster(write_model_folder(tmp_path / "bytes")):
        router.decode.says = ANSWER.encode()
        router.decode.flow.clear()
        opener = threading.Thread(target=_open_late, args=[router])
        opener.start()
        yield router
        opener.join()


def _open_late(router: RouterCluster) -> None:
    router.decode.wait_submits(1)
    time.sleep(LATE_S)
    router.decode.flow.set()


@pytest.mark.parametrize("client", [pytest.param(client, id=client.script) for client in CLIENTS if not client.is_late])
def test_a_client_of_a_cluster(client: Client, python: str, cluster: RunningCluster, tokenizer: Path) -> None:
    check(client, python, cluster.url, tokenizer)
    cluster.wait_until(cluster.is_empty, 60)


@pytest.mark.parametrize("client", [pytest.param(client, id=client.script) for client in CLIENTS if client.is_late])
def test_a_client_that_waits(client: Client, python: str, late_router: RouterCluster, tokenizer: Path) -> None:
    check(client, python, late_router.url, tokenizer)
    late_router.assert_empty()


def check(client: Client, python: str, url: str, tokenizer: Path) -> None:
    """Run the client's script, and record its result."""
    with recorded(client):
        checked = _run([python, "-m", "tests.clients.run", client.script, url, str(tokenizer)], CHECK_S)
    ROWS.append(row_of(client, checked=checked))


@contextmanager
def recorded(client: Client) -> Iterator[None]:
    """Record a failure in the table."""
    try:
        yield
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        ROWS.append(row_of(client, error=str(error)))
        raise


def _run(command: list[str], timeout_s: float) -> str:
    """Return a command's last line. Raise RuntimeError with all that it printed if it fails."""
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | OFFLINE, capture_output=True, text=True, timeout=timeout_s
    )
    if done.returncode != 0:
        raise RuntimeError(f"{done.stdout}\n{done.stderr}")
    return (done.stdout.splitlines() or [""])[-1]
