"""The engine without Ray, HTTP or a router: with its own command, and with the layout of every file for one machine."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.spec.loader import load_config
from cluster.spec.sampling import Stopping
from tests.fakes.clients import NEEDLE_TOKENS
from tests.fakes.local_cluster import LocalCluster, Prompt
from tests.fakes.recall_prompts import needle_prompt, recall_oracle
from tests.readme import ROOT
from workers.bench.process import RemoteError, WorkerProcess
from workers.models.recall import DEMO_ANSWER, DEMO_PROMPT
from workers.models.resolve import resolve_model

pytestmark = pytest.mark.integration

PROMPT = needle_prompt(1000, 0.5)
FILES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.mooncake] if "mooncake" in path.stem else [])
    for path in sorted((ROOT / "deploy").glob("local-*.yaml"))
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Yield processes that serve one file after another."""
    cluster = LocalCluster()
    yield cluster
    cluster.close()


def test_the_engine_answers_in_plain_processes() -> None:
    command = [sys.executable, "-m", "tests.fakes.local_cluster", "deploy/local-cpu.yaml", DEMO_PROMPT]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert (run.returncode, run.stdout.rstrip("\n"), run.stderr) == (0, DEMO_ANSWER, "")


@pytest.mark.parametrize("file", FILES)
def test_replicas_of_every_file_for_one_machine_answer(cluster: LocalCluster, file: Path) -> None:
    config = load_config(file, {"kv.memory_gib": "0.05"})
    cluster.load(config, resolve_model(config.model.path))
    with cluster.running():
        (answer,) = cluster.generate([Prompt(PROMPT, Stopping(max_tokens=NEEDLE_TOKENS))])
    assert answer == recall_oracle(PROMPT, NEEDLE_TOKENS)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_calls_to_a_killed_process_report_its_death(is_stopped: bool) -> None:
    process = WorkerProcess("types:SimpleNamespace")
    pid = process._process.pid
    assert pid is not None
    died = re.escape(f"worker process {pid} died, exit code -9")
    try:
        if is_stopped:  # it dies with a pending call
            os.kill(pid, signal.SIGSTOP)
            process.call("make")
        process._process.kill()
        if is_stopped:
            with pytest.raises(RemoteError, match=died):
                process.result(60)
        process._process.join()
        with pytest.raises(RemoteError, match=died):
            process.call("make")
    finally:
        process.close()
