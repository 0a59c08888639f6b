"""`baton bench kernels` where there is no GPU: one line, and nothing else."""

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.integration


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster.cli", "bench", "kernels", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which it would measure")
def test_without_a_gpu_it_refuses_in_a_line() -> None:
    result = bench()
    assert (result.returncode, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1
    assert "resources.device: got cuda, but torch" in result.stderr


def test_an_unknown_model_is_named() -> None:
    result = bench("--models", "Llama-3-8B,GPT-5")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--models: got 'GPT-5'; allowed: Llama-3-8B, " in result.stderr
