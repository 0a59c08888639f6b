"""`baton bench router` measures a real router before mock replicas."""

import json
import math
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration


def test_one_object_a_line_for_each_length_of_prompts() -> None:
    options = ["--prompt-len", "4,100", "--seconds", "0.2", "--connections", "2", "--streams", "2", "--json"]
    command = [sys.executable, "-m", "cluster.cli", "bench", "router", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["prompt_len"] for result in results] == [4, 100]
    for result in results:
        assert 0 < result["direct_p50_ms"] <= result["direct_p99_ms"]
        # On a busy machine a difference of two short runs may be anything.
        assert all(math.isfinite(result[name]) for name in ("added_p50_ms", "added_p99_ms"))
        assert result["req_per_s"] > 0
        assert result["stream_tok_per_s"] > 0
        for cores in ("request_cores", "half_cores", "stream_cores"):
            assert set(result[cores]) == {"router", "clients", "replicas"}


def test_what_makes_no_sense_is_refused() -> None:
    command = [sys.executable, "-m", "cluster.cli", "bench", "router", "--prompt-len", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 2
    assert "--prompt-len" in done.stderr
