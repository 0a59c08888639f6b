"""`baton bench cp` with real processes and a tiny model."""

import json
import subprocess
import sys

import pytest

from tests.readme import ROOT

TINY = ["--layers", "1", "--hidden-size", "32", "--heads", "2", "--kv-heads", "1", "--head-dim", "16"]
BYTES_PER_TOKEN = 2 * 16 * 2
"""K and V of one head of 16, in bf16."""


@pytest.mark.integration
def test_a_line_for_every_length_group_and_strategy() -> None:
    options = ["--prompt-len", "5,130", "--cp", "1,2", "--strategy", "contiguous,auto", "--rounds", "2"]
    command = [sys.executable, "-m", "cluster.cli", "bench", "cp", "--json", "--prefix-len", "70", *options, *TINY]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [(line["prompt_len"], line["cp"], line["strategy"]) for line in lines] == [
        (prompt_len, cp, strategy)
        for prompt_len in (5, 130)
        for cp, strategy in ((1, "none"), (2, "contiguous"), (2, "auto"))
    ]
    alone_s = {line["prompt_len"]: line["prefill_s"] for line in lines if line["cp"] == 1}
    for line in lines:
        assert line["efficiency"] == pytest.approx(alone_s[line["prompt_len"]] / (line["cp"] * line["prefill_s"]))
        assert line["kv_bytes_per_rank"] == (128 if line["prompt_len"] == 5 else 256) * BYTES_PER_TOKEN
        assert (line["mode"], line["prefix_len"], len(line["wait_shares"])) == ("gather", 70, line["cp"])
        assert 0.0 <= line["exposed_comm_share"] <= min(line["wait_shares"]) < 1.0
        assert line["estimate_s"] > 0
        assert line["cpu_s"] > 0
    waiting = [line for line in lines if line["cp"] == 2 and line["chosen"] == "contiguous"]
    assert waiting
    assert all(line["exposed_comm_share"] > 0 for line in waiting)
    assert all(line["exposed_comm_share"] == 0 for line in lines if line["chosen"] == "none")
