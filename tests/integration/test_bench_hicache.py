"""`baton bench hicache` with real processes and the demo model."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.bench.hicache import HicacheBench
from cluster.bench.hicache_load import Conversations, TracedRequests
from cluster.bench.trace import TraceEntry, TraceWorkload
from cluster.cli.main import main
from cluster.spec.errors import UserError
from cluster.spec.tiers import Tier
from tests.fakes.traces import make_entries, write_trace
from tests.readme import ROOT

HALF_A_POINT = 0.005


def lines_of(*options: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "cluster.cli", "bench", "hicache", "--json", *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.integration
def test_a_line_for_every_tier_and_hit() -> None:
    lengths = ["--prompt-len", "256", "--hits", "0,50,100"]
    lines = lines_of(*lengths, "--rounds", "1", "--kv-gib", "0.05", "--host-gib", "0.05")
    ways = [(line["tier"], line["cached_len"], line["prompt_len"]) for line in lines]
    assert ways == [(tier, cached, 256) for tier in ("device", "host", "storage") for cached in (0, 128, 192)]
    assert all(line["share"] == line["ttft_s"] / line["cold_s"] for line in lines)


@pytest.mark.integration
def test_conversations_find_in_lower_tiers_what_an_endless_cache_would_have() -> None:
    memory = ["--kv-gib", "0.0125", "--host-gib", "0.0375"]
    lines = lines_of("--conversations", "12", "--turns", "4", "--prompt-len", "2048", *memory)
    assert [line["lowest_tier"] for line in lines] == list(Tier)
    device, host, storage = lines
    assert device["hit_rate"] < host["hit_rate"] < storage["hit_rate"]
    assert storage["storage_rate"] > 0
    assert storage["hit_rate"] == pytest.approx(storage["best_hit_rate"], abs=HALF_A_POINT)


@pytest.mark.integration
def test_a_trace_finds_in_lower_tiers_what_an_endless_cache_would_have(tmp_path: Path) -> None:
    trace = ["--trace", str(write_trace(tmp_path / "trace.jsonl", 64, conversations=16))]
    device, host, storage = lines_of(*trace, "--trace-scale", "0.125", "--kv-gib", "0.003", "--host-gib", "0.004")
    assert device["hit_rate"] < host["hit_rate"] < storage["hit_rate"]
    assert storage["storage_rate"] > 0
    assert storage["hit_rate"] == pytest.approx(storage["best_hit_rate"], abs=HALF_A_POINT)


def test_a_conversation_grows_by_equal_parts_answers_included() -> None:
    asked: list[list[int]] = []

    def ask(prompts: Sequence[Sequence[int]], output_lens: Sequence[int]) -> list[list[int]]:
        asked.extend(list(prompt) for prompt in prompts)
        assert list(output_lens) == [10] * len(prompts)
        return [[len(prompt)] * 10 for prompt in prompts]

    Conversations(num_conversations=3, num_turns=4, prompt_len=200, answer_len=10, concurrency=2).run(ask, 4096)
    assert [len(prompt) for prompt in asked] == [length for length in (50, 100, 150, 200) for _ in range(3)]
    for earlier, later in zip(asked, asked[3:], strict=False):
        assert later[: len(earlier) + 10] == [*earlier, *[len(earlier)] * 10]
    assert len({tuple(prompt[:50]) for prompt in asked}) == 3


def test_a_trace_is_asked_in_its_order() -> None:
    trace = TraceWorkload([TraceEntry(**entry) for entry in make_entries(7)], scale=0.05)
    asked: list[list[list[int]]] = []

    def ask(prompts: Sequence[Sequence[int]], _output_lens: Sequence[int]) -> list[list[int]]:
        asked.append([list(prompt) for prompt in prompts])
        return [[] for _ in prompts]

    TracedRequests(trace=trace, concurrency=3).run(ask, 4096)
    assert [len(group) for group in asked] == [3, 3, 1]
    assert [prompt for group in asked for prompt in group] == [request.make_prompt() for request in trace.requests()]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(HicacheBench, hits=(0, 101)), "--hits: got 0,101; allowed: percents from 0 to 100"),
        (partial(HicacheBench, prompt_len=100, hits=(50,)), "--prompt-len: got 100; allowed: 256 or more"),
        (partial(HicacheBench, num_rounds=0), "--rounds: got 0; allowed: 1 or more"),
    ],
)
def test_values_without_sense_are_refused(make: Callable[[], HicacheBench], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--cp", "0"], "--cp: got 0; allowed: 1 or more"),
        (["--host-gib", "-1"], "--host-gib: got -1; allowed: a number over 0, 65536 at most"),
        (["--host-gib", "0"], "--host-gib: got 0; allowed: a number over 0, 65536 at most"),
        (["--kv-gib", "nan"], "--kv-gib: got nan; allowed: a number over 0, 65536 at most"),
    ],
)
@pytest.mark.parametrize("workload", [[], ["--conversations", "2"]])
def test_options_without_sense_end_in_one_line(
    options: list[str],
    line: str,
    workload: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["baton", "bench", "hicache", *workload, *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (2, f"{line}\n")


def test_a_conversation_too_short_for_its_turns_is_refused() -> None:
    with pytest.raises(UserError, match="--prompt-len: got 50; allowed: 68 or more"):
        Conversations(num_conversations=1, num_turns=4, prompt_len=50)
