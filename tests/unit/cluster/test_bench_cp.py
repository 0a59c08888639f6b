"""`baton bench cp`: options, and figures from hand-made step times."""

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

import cluster.bench.cp
from cluster.bench.cp import CpBench, CpResult, summarize
from cluster.cli.main import app
from cluster.machine_memory import MachineMemory
from cluster.spec.errors import UserError
from cluster.spec.step_messages import StepShape
from cluster.spec.strategy import CpMode, Passing, PassingSetting, Strategy, StrategySetting
from workers.bench.results import StepLens, StepTime, Way
from workers.context_parallel.cost_model import StrategyChoice


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
    options += ["--model", "tiny", "--dtype", "float32"]
    result = CliRunner().invoke(app, ["bench", "cp", *options])
    assert (result.exit_code, result.stdout) == (0, "")
    strategies = [StrategySetting.ZIGZAG, StrategySetting.AUTO]
    wanted = CpBench(
        prompt_lens=[64, 2048],
        cps=[1, 2, 4],
        strategies=strategies,
        modes=[CpMode.GATHER],
        passings=[PassingSetting.AUTO],
        prefix_lens=[0],
        num_rounds=3,
        model="tiny",
        dtype="float32",
    )
    assert asked == [wanted]


def test_the_default_is_the_qwen3_shape_with_contiguous_as_control(asked: list[CpBench]) -> None:
    assert CliRunner().invoke(app, ["bench", "cp", "--json"]).exit_code == 0
    assert (asked[0].model, asked[0].cps, asked[0].prompt_lens) == ("small", [1, 2], [2048, 8192])
    assert StrategySetting.CONTIGUOUS in asked[0].strategies


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cp", "1,two"], "--cp: got 'two'; allowed: integers"),
        (["--strategy", "zigag"], "--strategy: got 'zigag'; allowed: auto, none, whole_request, contiguous, zigzag"),
        (["--prompt-len", ""], "--prompt-len: got ''"),
        (["--prompt-len", "0"], "--prompt-len: got 0; allowed: 1 or more"),
        (["--cp", "0"], "--cp: got 0; allowed: 1 to 4096"),
        (["--mode", "rings"], "--mode: got 'rings'; allowed: gather, ring"),
        (["--passing", "q"], "--passing: got 'q'; allowed: auto, pass_kv, pass_q"),
        (["--prefix-len", "-1"], "--prefix-len: got -1; allowed: 0 or more"),
        (["--cp", "1", "--mode", "ring"], "--mode: ring mode needs cp ≥ 2; got --cp 1"),
        (["--passing", "pass_q"], "--passing: got pass_q with --mode gather; allowed: with --mode ring"),
        (["--cp", "2,1000000"], "--cp: got 1000000; allowed: 1 to 4096"),
        (["--model", "GPT-5"], "--model: got 'GPT-5'; allowed: Llama-3-8B, "),
        (["--dtype", "int8"], "--dtype: got 'int8'; allowed: bfloat16, float32"),
    ],
)
def test_nonsense_is_refused_in_words(options: list[str], words: str, asked: list[CpBench]) -> None:
    result = CliRunner().invoke(app, ["bench", "cp", *options])
    assert isinstance(result.exception, UserError)
    assert words in str(result.exception)
    assert asked == []


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


def test_the_slowest_rank_sets_the_time_and_the_busiest_the_exposed_share() -> None:
    choice = StrategyChoice(StepShape(strategy=Strategy.ZIGZAG, passing=Passing.PASS_Q), 1.5, {Strategy.ZIGZAG: 1.5})
    way = Way(cp=2, mode=CpMode.RING, strategy=StrategySetting.AUTO, passing=PassingSetting.AUTO)
    alone = [[StepTime(3.0, 0.0)], [StepTime(6.0, 0.0)], [StepTime(5.0, 0.0)]]
    rounds = [
        [StepTime(2.0, 1.0), StepTime(1.0, 0.5)],
        [StepTime(4.0, 2.0), StepTime(4.0, 0.0)],
        [StepTime(1.0, 0.2), StepTime(2.0, 0.2)],
    ]
    result = summarize(way, StepLens(8, 16), choice, rounds, alone, kv_bytes=7)
    assert result == CpResult(
        strategy=StrategySetting.AUTO,
        mode=CpMode.RING,
        passing=PassingSetting.AUTO,
        cp=2,
        prompt_len=8,
        prefix_len=16,
        prefill_s=2.0,
        efficiency=0.75,
        exposed_comm_share=0.1,
        kv_bytes_per_rank=7,
        chosen=Strategy.ZIGZAG,
        chosen_passing=Passing.PASS_Q,
        estimate_s=1.5,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt-len", "100000000000"], "100000000000 tokens on 2 ranks of small take 1.53e+06 GiB"),
        (["--model", "Llama-3-8B", "--prompt-len", "5"], "5 tokens on 2 ranks of Llama-3-8B take 29.9 GiB"),
    ],
)
def test_runs_that_do_not_fit_into_memory_are_refused(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MachineMemory(total=16 << 30, available=16 << 30)
    monkeypatch.setattr(cluster.bench.cp, "machine_memory", lambda: memory)
    result = CliRunner().invoke(app, ["bench", "cp", *options])
    assert isinstance(result.exception, UserError)
    assert words in str(result.exception)
    assert str(result.exception).endswith("allowed: at most 16 GiB")
