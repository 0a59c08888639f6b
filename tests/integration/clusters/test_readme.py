"""README's clusters, started as printed: with a model from the hub, and as a Ray job."""

import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests import readme
from tests.fakes.cluster import answers
from tests.fakes.hub import write_hub_cache
from tests.terminal import Terminal

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

URL = "http://127.0.0.1:8000"
CTRL_C = b"\x03"
START_S = 120.0
STOP_S = 60.0
NO_AGENT = "No available agent to submit job"


def test_a_model_of_the_hub(tmp_path: Path) -> None:
    """The hub is a cache folder with a small checkpoint under the model's name. No file of the folder is imported."""
    name = "Qwen/Qwen3-0.6B"
    for package in ("cluster", "router", "transfer", "workers"):
        (tmp_path / f"{package}.py").write_text("raise SystemExit('imported from the current folder')")
    (tmp_path / "deploy").symlink_to(readme.ROOT / "deploy")
    write_hub_cache(tmp_path, name)
    command = shlex.split(readme.installed(readme.command(".venv/bin/baton up")))
    with Terminal(command, {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}, tmp_path) as terminal:
        terminal.wait_until(_is_ready, START_S)
        served = httpx.get(f"{URL}/v1/models").json()["data"][0]["id"]
        assert served == name.split("/")[1]
        body = {"model": served, "prompt": [20, 21, 22], "max_tokens": 4, "ignore_eos": True}
        usage = httpx.post(f"{URL}/v1/completions", json=body, timeout=60).json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 4)
        terminal.press(CTRL_C)
        assert terminal.wait(STOP_S) == 0, terminal.screen


@pytest.fixture
def short_folder() -> Iterator[str]:
    """Yield a folder for Ray's sockets, whose paths must be shorter than those in pytest's folders."""
    with tempfile.TemporaryDirectory(prefix="baton-job-", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.mark.skipif(" " in sys.prefix, reason="Ray's job agent does not start from a path with a space")
def test_ray_job(short_folder: str) -> None:
    env = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "disabled",
        "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:8299",
        "RAY_TMPDIR": short_folder,
    }
    head = "ray start --head --block --port=6399 --dashboard-port=8299 --num-cpus=4 --disable-usage-stats"
    with Terminal(shlex.split(head), env) as ray_head:
        ray_head.wait_until(lambda: answers("http://127.0.0.1:8299/api/version"), START_S)
        with _submitted(env) as job:
            readme.run(readme.command("ray job stop"), env)
            assert not answers(f"{URL}/health")
            job.wait(STOP_S)
        ray_head.press(CTRL_C)
        ray_head.wait(STOP_S)


@contextmanager
def _submitted(env: Mapping[str, str]) -> Iterator[Terminal]:
    """Yield the running job. Ray's head answers before it accepts jobs, and asks clients to retry."""
    while True:
        with Terminal(shlex.split(readme.command("ray job submit")), env) as job:
            job.wait_until(partial(_is_ready_or_refused, job), START_S)
            if NO_AGENT not in job.output:
                yield job
                return


def _is_ready_or_refused(job: Terminal) -> bool:
    return _is_ready() or NO_AGENT in job.output


def _is_ready() -> bool:
    return answers(f"{URL}/ready")
