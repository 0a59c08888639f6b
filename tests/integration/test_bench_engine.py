"""`baton bench engine` as users call it, on the CPU."""

import json
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.integration

FIELDS = [
    "model",
    "prompt_len",
    "output_len",
    "ttft_s",
    "tpot_s",
    "ttft_floor_s",
    "tpot_floor_s",
    "ttft_ratio",
    "tpot_ratio",
    "host_s",
    "transformers_ttft_s",
    "transformers_tpot_s",
    "num_same_tokens",
    "transformers_problem",
]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster.cli", "bench", "engine", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


def test_a_line_for_each_length() -> None:
    lens = ["--prompt-len", "70,150", "--output-len", "5", "--chunk-tokens", "64", "--rounds", "2"]
    run = bench("--device", "cpu", "--model", "tiny", "--json", *lens)
    assert (run.returncode, run.stderr) == (0, "")
    limits, *results = map(json.loads, run.stdout.splitlines())
    rates = {"flops_per_s", "bytes_per_s", "to_host_bytes_per_s", "from_host_bytes_per_s"}
    assert set(limits) == {"device", *rates}
    assert [result["prompt_len"] for result in results] == [70, 150]
    for result in results:
        assert list(result) == FIELDS
        assert result["num_same_tokens"] == 5
        assert result.pop("host_s") is None
        assert all(value > 0 for name, value in result.items() if name.endswith(("_s", "_ratio")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which it would measure")
def test_without_a_gpu_it_refuses_in_a_line() -> None:
    run = bench("--model", "tiny")
    assert (run.returncode, run.stdout) == (1, "")
    assert len(run.stderr.splitlines()) == 1
    assert "resources.device: got cuda, but torch" in run.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "GPT-5"], "--model: got 'GPT-5'; allowed: Llama-3-8B, "),
        (["--prompt-len", "64,0"], "--prompt-len: got 0; allowed: 1 to "),
        (["--output-len", "1"], "--output-len: got 1; allowed: 2 or more"),
        (["--device", "tpu"], "--device: got 'tpu'; allowed: cpu, cuda"),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], words: str) -> None:
    run = bench(*options)
    assert (run.returncode, run.stdout) == (2, "")
    assert words in run.stderr
