"""`baton bench cp`: options, and figures from hand-made step times."""

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

import cluster.bench.cp
from cluster.bench.cp import CpBench
from cluster.bench.cp_result import CpResult, summarize
from cluster.bench.model_size import ModelSize
from cluster.cli.bench_cp import parse_list
from cluster.cli.main import app
from cluster.machine_memory import MachineMemory
from cluster.spec.errors import UserError
from cluster.spec.strategy import CpMode, Passing, PassingSetting, Strategy, StrategySetting
from workers.bench_step import StepLens, StepTime, Way
from workers.context_parallel.cost_model import Choice


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[CpBench]:
    """What the command asks to be measured; nothing is."""
    benches: list[CpBench] = []

    def run(bench: CpBench) -> Iterator[CpResult]:
        benches.append(bench)
        return iter(())

    monkeypatch.setattr(cluster.bench.cp, "run_cp_bench", run)
    return benches


def test_lists_and_sizes_are_understood(asked: list[CpBench]) -> None:
    options = ["--json", "--prompt-len", "64, 2048", "--cp", "1,2,4", "--strategy", "zigzag,auto", "--rounds", "3"]
    options += ["--layers", "2", "--hidden-size", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
    result = CliRunner().invoke(app, ["bench", "cp", *options])
    assert (result.exit_code, result.stdout) == (0, "")
    size = ModelSize(
        num_layers=2, hidden_size=64, intermediate_size=192, num_heads=4, num_kv_heads=2, head_dim=16, dtype="bfloat16"
    )
    strategies = (StrategySetting.ZIGZAG, StrategySetting.AUTO)
    assert asked == [CpBench(prompt_lens=(64, 2048), cps=(1, 2, 4), strategies=strategies, num_rounds=3, model=size)]


def test_the_default_is_the_qwen3_shape_with_contiguous_as_control(asked: list[CpBench]) -> None:
    assert CliRunner().invoke(app, ["bench", "cp", "--json"]).exit_code == 0
    assert (asked[0].model, asked[0].cps, asked[0].prompt_lens) == (ModelSize(), (1, 2), (2048, 8192))
    assert StrategySetting.CONTIGUOUS in asked[0].strategies


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cp", "1,two"], "--cp: got 'two'; allowed: whole numbers"),
        (["--strategy", "zigag"], "--strategy: got 'zigag'; allowed: auto, none, whole_request, contiguous, zigzag"),
        (["--prompt-len", ""], "--prompt-len: got ''"),
        (["--prompt-len", "0"], "--prompt-len: got 0; allowed: 1 or more"),
        (["--cp", "0"], "--cp: got 0; allowed: 1 or more"),
        (["--rounds", "0"], "--rounds: got 0; allowed: 1 or more"),
        (["--mode", "rings"], "--mode: got 'rings'; allowed: gather, ring"),
        (["--passing", "q"], "--passing: got 'q'; allowed: auto, pass_kv, pass_q"),
        (["--prefix-len", "-1"], "--prefix-len: got -1; allowed: 0 or more"),
        (["--cp", "1", "--mode", "ring"], "--mode: got ring with --cp 1; one rank is no ring"),
        (["--passing", "pass_q"], "--passing: got pass_q with --mode gather; only ring mode has a passing"),
        (["--cp", "2,1000000"], "--cp: got 1000000; allowed: at most 4096, the workers of a replica"),
        (["--layers", "100000"], "--layers: got 100000; allowed: at most 4096"),
        (["--layers", "0"], "--layers: got 0; allowed: 1 or more"),
        (["--heads", "3", "--kv-heads", "2"], "--kv-heads: got 2; allowed: a divisor of --heads 3"),
    ],
)
def test_nonsense_is_refused_in_words(options: list[str], words: str, asked: list[CpBench]) -> None:
    result = CliRunner().invoke(app, ["bench", "cp", *options])
    assert isinstance(result.exception, UserError)
    assert words in str(result.exception)
    assert asked == []


def test_lists_keep_their_order() -> None:
    assert parse_list("--cp", "4,1 ,2", int, "numbers") == (4, 1, 2)


def test_one_rank_comes_first_and_once_and_passings_belong_to_the_ring() -> None:
    bench = CpBench(
        prompt_lens=(8,),
        cps=(4, 1, 2),
        strategies=(StrategySetting.NONE, StrategySetting.AUTO),
        modes=(CpMode.GATHER, CpMode.RING),
        passings=(PassingSetting.PASS_KV, PassingSetting.PASS_Q),
    )
    ways = [(way.cp, way.mode, way.passing, way.strategy) for way in bench.ways()]
    assert ways[0] == (1, "gather", None, "none")
    assert ways[1:7] == [
        (2, mode, passing, strategy)
        for mode, passing in (("gather", None), ("ring", "pass_kv"), ("ring", "pass_q"))
        for strategy in ("none", "auto")
    ]
    assert [way[0] for way in ways[7:]] == [4] * 6


def test_every_prompt_is_measured_on_every_prefix() -> None:
    bench = CpBench(prompt_lens=(8, 9), cps=(1,), strategies=(StrategySetting.NONE,), prefix_lens=(0, 5))
    assert [(lens.prompt_len, lens.prefix_len) for lens in bench.lens] == [(8, 0), (9, 0), (8, 5), (9, 5)]


def test_the_slowest_rank_sets_the_time_and_the_busiest_the_exposed_share() -> None:
    choice = Choice(Strategy.ZIGZAG, 1.5, {Strategy.ZIGZAG: 1.5}, Passing.PASS_Q)
    way = Way(cp=2, mode=CpMode.RING, strategy=StrategySetting.AUTO, passing=PassingSetting.AUTO)
    alone = [[_time(3.0, 0.0)], [_time(6.0, 0.0)], [_time(5.0, 0.0)]]
    rounds = [
        [_time(2.0, 1.0), _time(1.0, 0.5)],
        [_time(4.0, 2.0), _time(4.0, 0.0)],
        [_time(1.0, 0.2), _time(2.0, 0.2)],
    ]
    fields: dict[str, Any] = summarize(way, StepLens(8, 16), choice, rounds, alone)
    assert fields["prefill_s"] == 2.0
    assert fields["efficiency"] == 0.75
    assert fields["attention_efficiency"] == 0.75
    assert fields["wait_shares"] == (0.5, 0.1)
    assert fields["exposed_comm_share"] == 0.1
    assert fields["cpu_s"] == 1.8
    assert (fields["prompt_len"], fields["prefix_len"], fields["estimate_s"]) == (8, 16, 1.5)
    assert (fields["strategy"], fields["passing"], fields["mode"]) == ("auto", "auto", "ring")
    assert (fields["chosen"], fields["chosen_passing"]) == ("zigzag", "pass_q")


def _time(seconds: float, waited_s: float) -> StepTime:
    return StepTime(seconds=seconds, waited_s=waited_s, cpu_s=seconds - waited_s, attention_s=seconds / 2)


def test_prompts_that_memory_cannot_hold_are_refused_before_anything_starts() -> None:
    result = CliRunner().invoke(app, ["bench", "cp", "--prompt-len", "100000000000", "--cp", "2"])
    assert isinstance(result.exception, UserError)
    words = "--prompt-len: got 100000000000 tokens, whose KV takes 1.53e+06 GiB in 2 processes; allowed: what fits"
    assert words in str(result.exception)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cp", "4096"], "--cp, --layers: got 4096 and 8, which take 320 GiB without a prompt; allowed: what fits"),
        (
            ["--cp", "2", "--layers", "4096", "--hidden-size", "4096"],
            "--cp, --layers: got 2 and 4096, which take 2.4e+03 GiB without a prompt; allowed: what fits into 16 GiB",
        ),
    ],
)
def test_ranks_that_memory_cannot_hold_are_refused_before_anything_starts(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MachineMemory(total=16 << 30, available=16 << 30)
    monkeypatch.setattr(cluster.bench.cp, "machine_memory", lambda: memory)
    monkeypatch.setattr(cluster.bench.cp, "_ranks", None)
    result = CliRunner().invoke(app, ["bench", "cp", "--prompt-len", "5", *options])
    assert isinstance(result.exception, UserError)
    assert words in str(result.exception)


def test_weights_are_counted_as_the_planner_counts_them() -> None:
    size = ModelSize(num_layers=3, hidden_size=8, intermediate_size=16, num_heads=4, num_kv_heads=2, head_dim=2)
    config = size.config(64)
    assert size.weight_bytes == 2 * (2 * config.vocab_size * config.hidden_size + 3 * config.layer_weights(0).used)
