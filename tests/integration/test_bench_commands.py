"""`baton bench cp`, `engine` and `kernels` as users call them, with real processes and a tiny model."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import cluster.bench.cp
from cluster.cli.main import app
from tests.readme import ROOT

pytestmark = pytest.mark.integration

TINY = ["--model", "tiny"]
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 2
"""K and V of two layers of two heads of 16, in bf16."""


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster.cli", "bench", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)


def test_cp_prints_a_line_for_every_length_group_mode_and_strategy() -> None:
    options = ["--prompt-len", "5,130", "--cp", "1,2", "--strategy", "contiguous,auto", "--rounds", "2"]
    options += ["--mode", "gather,ring", "--passing", "pass_kv,pass_q", "--prefix-len", "70"]
    run = bench("cp", "--json", *options, *TINY)
    assert (run.returncode, run.stderr) == (0, "")
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    modes = [("gather", None), ("ring", "pass_kv"), ("ring", "pass_q")]
    ways = [(2, *mode, strategy) for mode in modes for strategy in ("contiguous", "auto")]
    assert [(line["prompt_len"], line["cp"], line["mode"], line["passing"], line["strategy"]) for line in lines] == [
        (prompt_len, *way) for prompt_len in (5, 130) for way in [(1, "gather", None, "none"), *ways]
    ]
    for line in lines:
        num_pages = 2 if line["prompt_len"] == 5 else 4
        held = num_pages // 2 if line["mode"] == "ring" else num_pages
        assert line["kv_bytes_per_rank"] == held * 64 * BYTES_PER_TOKEN
        assert line["prefix_len"] == 70
        assert line["chosen_passing"] == line["passing"]
        assert 0.0 <= line["exposed_comm_share"] < 1.0
        assert min(line["estimate_s"], line["efficiency"]) > 0
        if line["cp"] == 1:
            assert line["efficiency"] == 1.0
        if line["chosen"] == "contiguous":
            assert line["exposed_comm_share"] > 0
        elif line["mode"] == "gather":
            assert line["exposed_comm_share"] == 0


def test_cp_reports_a_rank_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    start = cluster.bench.cp._start

    def start_and_kill(ranks: Any, *args: Any) -> None:
        start(ranks, *args)
        ranks[0]._process.kill()
        ranks[0]._process.join()

    monkeypatch.setattr(cluster.bench.cp, "_start", start_and_kill)
    result = CliRunner().invoke(app, ["bench", "cp", "--prompt-len", "5", "--cp", "1", "--rounds", "1", *TINY])
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(r"baton bench: worker process \d+ died, exit code -9\n", result.stderr)


def test_engine_prints_a_line_for_each_length() -> None:
    lens = ["--prompt-len", "70,150", "--output-len", "5", "--chunk-tokens", "64", "--rounds", "2"]
    run = bench("engine", "--device", "cpu", *TINY, "--json", *lens)
    assert (run.returncode, run.stderr) == (0, "")
    limits, *results = map(json.loads, run.stdout.splitlines())
    assert min(limits["flops_per_s"], limits["bytes_per_s"]) > 0
    assert [result["prompt_len"] for result in results] == [70, 150]
    for result in results:
        assert result["num_same_tokens"] == 5
        assert all(value > 0 for name, value in result.items() if name.endswith(("_s", "_ratio")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which it would measure")
@pytest.mark.parametrize("command", ["engine", "kernels"])
def test_without_a_gpu_a_command_fails_with_one_line(command: str) -> None:
    run = bench(command)
    assert (run.returncode, run.stdout, len(run.stderr.splitlines())) == (1, "", 1)
    assert "resources.device: got cuda, but torch" in run.stderr


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
