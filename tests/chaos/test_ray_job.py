"""`ray job stop` under load, and the same job again immediately: no request is lost, and no conflict occurs."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.report import report
from tests.chaos.streams import Crowd, Stream
from tests.fakes.cluster import (
    CTRL_C,
    IS_UP,
    START_S,
    STOP_S,
    RunningCluster,
    answers,
    free_port,
    up_command,
)
from tests.readme import ROOT
from tests.terminal import Terminal

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.full, pytest.mark.timeout(900)]

CLIENTS = 4
NUM_TOKENS = 300
RAY_STOP_S = 300.0
"""Limit for Ray's own processes, which are slow on a busy machine."""
BEGIN_S = 300.0


@pytest.fixture
def env() -> Iterator[dict[str, str]]:
    """Yield the environment of every `ray` command, with a Ray cluster that accepts jobs."""
    ports = {name: free_port() for name in ("--port", "--dashboard-port", "--ray-client-server-port")}
    url = f"http://127.0.0.1:{ports['--dashboard-port']}"
    with tempfile.TemporaryDirectory(prefix="br-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        env = {"RAY_AUTH_MODE": "disabled", "RAY_API_SERVER_ADDRESS": url, "RAY_TMPDIR": folder}
        env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        start = ["ray", "start", "--head", "--block", "--num-cpus=4", "--disable-usage-stats"]
        start += ["--dashboard-agent-listen-port=0"]
        with Terminal([*start, *(f"{name}={port}" for name, port in ports.items())], env) as head:
            head.wait_until(lambda: answers(f"{url}/api/version"), START_S)
            yield env
            head.press(CTRL_C)
            head.wait(RAY_STOP_S)


@contextmanager
def job(name: str, port: int, env: dict[str, str]) -> Iterator[RunningCluster]:
    """Run a cluster as a Ray job until somebody stops it."""
    submit = ["ray", "job", "submit", "--working-dir", ".", "--runtime-env", "deploy/job.yaml", "--submission-id", name]
    python = ["--", "python", "-m", "cluster.cli"]
    command = up_command("deploy/local-cpu.yaml", "test-job", port, "kv.memory_gib=0.25", program=[*submit, *python])
    with Terminal(command, env) as terminal:
        terminal.wait_until(lambda: IS_UP in terminal.output, START_S)
        yield RunningCluster(f"http://127.0.0.1:{port}", terminal)
        terminal.wait(STOP_S)


def stop(name: str, env: dict[str, str]) -> str:
    """Run `ray job stop`. Return the proof that it happened."""
    command = ["ray", "job", "stop", name]
    output = subprocess.run(command, env=os.environ | env, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"Job '{name}' was stopped" in output
    return f"`{' '.join(command)}`: Job '{name}' was stopped"


def test_a_job_is_stopped_and_submitted_again(env: dict[str, str]) -> None:
    port = free_port()
    with job("first", port, env) as cluster, Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=2500) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(5), BEGIN_S)
        start_s = time.monotonic()
        proof = stop("first", env)
    with job("second", port, env) as cluster:
        recovery_s = time.monotonic() - start_s
        stream = Stream(20, seed=2)
        stream.run(cluster.url)
        assert stream.end == "right", stream.end
        line = report("ray job stop, submitted again", cluster, crowd, proof, recovery_s=recovery_s)
        stop("second", env)
    assert (line.success, line.leaked_pages) == (CLIENTS, 0), [stream.end for stream in crowd.streams]
