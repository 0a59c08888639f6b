"""README's commands for the cluster that `make serve` started, as printed."""

import json
import subprocess
import sys

import pytest

from tests import readme
from tests.fakes.cluster import RunningCluster
from workers.models.recall import DEMO_ANSWER

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("cluster")]


def test_curl() -> None:
    answer = json.loads(readme.run(readme.command("curl")))
    assert answer["choices"][0]["message"]["content"] == DEMO_ANSWER


def test_the_curl_that_serve_prints(cluster: RunningCluster) -> None:
    (line,) = (line.strip() for line in cluster.terminal.output.splitlines() if line.strip().startswith("curl "))
    assert "choices" in json.loads(readme.run(line))


def test_openai_client() -> None:
    (block,) = readme.blocks("python")
    printed = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=120)
    assert (printed.stdout, printed.stderr) == (DEMO_ANSWER, "")


def test_chat() -> None:
    assert readme.run(readme.command(".venv/bin/baton chat")) == DEMO_ANSWER + "\n"


def test_doctor() -> None:
    assert "127.0.0.1:8000" in readme.run(readme.command(".venv/bin/baton doctor"))


def test_plan() -> None:
    assert "prefill-0" in readme.run(readme.command(".venv/bin/baton plan"))


def test_status() -> None:
    status = readme.run(readme.command(".venv/bin/baton status"))
    assert "prefill-0" in status
    assert "decode-0" in status


def test_bench() -> None:
    assert "8 completed, 0 failed" in readme.run(readme.command(".venv/bin/baton bench"))
