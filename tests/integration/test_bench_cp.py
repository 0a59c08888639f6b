"""`baton bench cp` with real processes and a tiny model."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

import cluster.bench.cp
from cluster.cli.main import app
from tests.readme import ROOT

TINY = ["--layers", "1", "--hidden-size", "32", "--heads", "2", "--kv-heads", "1", "--head-dim", "16"]
BYTES_PER_TOKEN = 2 * 16 * 2
"""K and V of one head of 16, in bf16."""


@pytest.mark.integration
def test_a_line_for_every_length_group_mode_and_strategy() -> None:
    options = ["--prompt-len", "5,130", "--cp", "1,2", "--strategy", "contiguous,auto", "--rounds", "2"]
    options += ["--mode", "gather,ring", "--passing", "pass_kv,pass_q", "--prefix-len", "70"]
    command = [sys.executable, "-m", "cluster.cli", "bench", "cp", "--json", *options, *TINY]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
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
        assert (line["prefix_len"], len(line["wait_shares"])) == (70, line["cp"])
        assert line["chosen_passing"] == line["passing"]
        assert 0.0 <= line["exposed_comm_share"] <= min(line["wait_shares"]) < 1.0
        assert min(line[name] for name in ("estimate_s", "cpu_s", "efficiency", "attention_efficiency")) > 0
        if line["cp"] == 1:
            assert line["efficiency"] == line["attention_efficiency"] == 1.0
        if line["chosen"] == "contiguous":
            assert line["exposed_comm_share"] > 0
        elif line["mode"] == "gather":
            assert line["exposed_comm_share"] == 0


@pytest.mark.integration
def test_a_rank_that_was_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    start = cluster.bench.cp._start

    def start_and_kill(ranks: Any, *args: Any) -> None:
        start(ranks, *args)
        ranks[0]._process.kill()
        ranks[0]._process.join()

    monkeypatch.setattr(cluster.bench.cp, "_start", start_and_kill)
    result = CliRunner().invoke(app, ["bench", "cp", "--prompt-len", "5", "--cp", "1", "--rounds", "1", *TINY])
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(r"baton bench: worker process \d+ died, exit code -9\n", result.stderr)
