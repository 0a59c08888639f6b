"""The engine without Ray, HTTP or a router, as its own command runs it."""

import subprocess
import sys

import pytest

from tests.readme import ROOT
from workers.models.recall import DEMO_ANSWER, DEMO_PROMPT


@pytest.mark.integration
@pytest.mark.parametrize(
    "file",
    [
        "local-cpu",
        "local-cpu-tp",
        "local-cpu-dp",
        "local-cpu-moe",
        pytest.param("local-cpu-pp", marks=pytest.mark.full),
    ],
)
def test_the_engine_answers_in_plain_processes(file: str) -> None:
    command = [sys.executable, "-m", "workers.local", f"deploy/{file}.yaml", DEMO_PROMPT]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert (run.returncode, run.stdout.rstrip("\n"), run.stderr) == (0, DEMO_ANSWER, "")
