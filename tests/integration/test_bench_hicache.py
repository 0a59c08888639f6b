"""`baton bench hicache` with real processes and the demo model."""

import json
import subprocess
import sys

import pytest

from cluster.bench.hicache import HicacheBench
from cluster.spec.errors import UserError
from tests.readme import ROOT


@pytest.mark.integration
def test_a_line_for_every_tier_and_hit() -> None:
    options = ["--prompt-len", "256", "--hits", "50,100", "--rounds", "1", "--kv-gib", "0.05", "--host-gib", "0.05"]
    command = [sys.executable, "-m", "cluster.cli", "bench", "hicache", "--json", *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    ways = [(line["tier"], line["cached_len"], line["prompt_len"]) for line in lines]
    assert ways == [(tier, cached, 256) for tier in ("device", "host", "storage") for cached in (128, 192)]
    assert all(line["share"] == line["ttft_s"] / line["cold_s"] for line in lines)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hits": (0,)}, "--hits: got 0; allowed: percents from 1 to 100"),
        ({"prompt_len": 100, "hits": (50,)}, "--prompt-len: got 100; allowed: 256 or more"),
        ({"num_rounds": 0}, "--rounds: got 0; allowed: 1 or more"),
    ],
)
def test_values_without_sense_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        HicacheBench(**values)  # type: ignore[arg-type]
