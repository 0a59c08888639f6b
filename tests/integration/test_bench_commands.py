"""`baton bench cp`, `engine` and `kernels` in real processes, with a tiny model."""

import json
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import cluster.bench.cp
from cluster.bench.cp import CpBench, CpResult
from cluster.cli.app import app
from tests.readme import ROOT
from workers.bench.process import WorkerProcess

pytestmark = pytest.mark.integration

TINY = ["--model", "tiny"]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster.cli", "bench", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)


def test_cp_prints_a_line_for_every_length_and_strategy(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt-len", "5,130", "--cp", "2", "--strategy", "contiguous,auto", "--rounds", "1"]
    options += ["--shard-linear", "gather", "--collectives", "tcp"]
    result = CliRunner().invoke(app, ["bench", "cp", "--json", *options, "--mode", "ring", "--prefix-len", "70", *TINY])
    assert (result.exit_code, result.stderr, capfd.readouterr().err) == (0, "", "")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    ways = [(1, "none"), (2, "contiguous"), (2, "auto")]
    assert [(line["prompt_len"], line["cp"], line["strategy"]) for line in lines] == [
        (prompt_len, *way) for prompt_len in (5, 130) for way in ways
    ]
    for line in lines:
        assert min(line["prefill_ms"], line["estimate_ms"], line["efficiency"]) > 0
        if line["cp"] == 1:
            assert (line["efficiency"], line["exposed_comm_share"], line["received_mib"]) == (1.0, 0.0, 0.0)
        if line["strategy"] == "contiguous":
            assert line["chosen"] in ("contiguous pass_kv", "contiguous pass_q")
            assert line["received_mib"] > 0
            assert 0 < line["exposed_projections_share"] < line["exposed_comm_share"] < 1


def test_cp_reports_a_rank_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = cluster.bench.cp._measure

    def kill_and_measure(bench: CpBench, ranks: list[WorkerProcess], prompt_len: int) -> list[CpResult]:
        ranks[0]._process.kill()
        ranks[0]._process.join()
        return measure(bench, ranks, prompt_len)

    monkeypatch.setattr(cluster.bench.cp, "_measure", kill_and_measure)
    result = CliRunner().invoke(app, ["bench", "cp", "--prompt-len", "5", "--cp", "1", "--rounds", "1", *TINY])
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(r"baton bench: worker process \d+ died, exit code -9\n", result.stderr)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_engine_prints_a_line_for_each_length(dtype: str) -> None:
    lens = ["--prompt-len", "70,150", "--output-len", "5", "--rounds", "1"]
    run = bench("engine", "--device", "cpu", "--dtype", dtype, *TINY, "--json", *lens)
    assert (run.returncode, run.stderr) == (0, "")
    limits, *results = map(json.loads, run.stdout.splitlines())
    assert min(limits["flops_per_s"], limits["bytes_per_s"]) > 0
    assert [result["prompt_len"] for result in results] == [70, 150]
    for result in results:
        assert result["num_same_tokens"] == 5 or dtype == "bfloat16"
        assert all(value > 0 for name, value in result.items() if name.endswith(("_ms", "_ratio")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which it would measure")
@pytest.mark.parametrize(
    ("command", "words"),
    [("engine", "--device: got cuda, but torch"), ("kernels", "kernels need a GPU, but torch")],
)
def test_without_a_gpu_a_command_fails_with_one_line(command: str, words: str) -> None:
    result = CliRunner().invoke(app, ["bench", command])
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
    assert words in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["engine", "--model", "GPT-5"], "--model: got 'GPT-5'; allowed: Llama-3-8B, "),
        (["engine", "--prompt-len", "64,0"], "--prompt-len: got 0; allowed: 1 to "),
        (["kernels", "--models", "Llama-3-8B,GPT-5"], "--models: got 'GPT-5'; allowed: Llama-3-8B, "),
    ],
)
def test_wrong_options_are_refused(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", *options])
    assert words in str(result.exception)
