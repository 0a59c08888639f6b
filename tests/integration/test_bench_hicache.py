"""`tests.bench.hicache`: with storage, conversations have as many hits as with an unbounded cache."""

import json
import subprocess
import sys

import pytest

from cluster.spec.tiers import Tier
from tests.readme import ROOT

HALF_A_POINT = 0.005


@pytest.mark.integration
def test_storage_has_the_hits_of_an_unbounded_cache() -> None:
    load = ["--conversations", "8", "--turns", "3", "--prompt-len", "768"]
    memory = ["--kv-gib", "0.0035", "--host-gib", "0.006"]
    command = [sys.executable, "-m", "tests.bench.hicache", "conversations", *load, *memory]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    device, host, storage = map(json.loads, run.stdout.splitlines())
    assert [line["lowest_tier"] for line in (device, host, storage)] == list(Tier)
    assert device["hit_rate"] < host["hit_rate"] < storage["hit_rate"]
    assert storage["storage_rate"] > 0
    assert storage["hit_rate"] == pytest.approx(storage["unbounded_hit_rate"], abs=HALF_A_POINT)
