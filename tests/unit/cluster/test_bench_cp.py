"""`baton bench cp`: options, and results from fixed step times."""

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

import cluster.bench.cp
from cluster.bench.cp import CpBench, CpResult, summarize_way
from cluster.cli.app import app
from cluster.machine_memory import MachineMemory
from cluster.spec.errors import UserError
from cluster.spec.step_messages import StepShape
from cluster.spec.strategy import Collectives, CpMode, Passing, ShardLinear, Strategy, StrategySetting
from workers.bench.results import StepTime, Way
from workers.context_parallel.strategy_chooser import StrategyChoice


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[CpBench]:
    """Benchmarks that the command would run."""
    benches: list[CpBench] = []

    def run(bench: CpBench) -> Iterator[CpResult]:
        benches.append(bench)
        return iter(())

    monkeypatch.setattr(cluster.bench.cp, "run_cp_bench", run)
    return benches


def test_options_are_parsed(asked: list[CpBench]) -> None:
    options = ["--json", "--prompt-len", "64, 2048", "--cp", "4", "--strategy", "zigzag,auto", "--rounds", "3"]
    options += ["--model", "tiny", "--mode", "ring", "--prefix-len", "70"]
    options += ["--shard-linear", "broadcast", "--collectives", "tcp"]
    result = CliRunner().invoke(app, ["bench", "cp", *options])
    assert (result.exit_code, result.stdout) == (0, "")
    wanted = CpBench(
        prompt_lens=[64, 2048],
        prefix_len=70,
        cp=4,
        mode=CpMode.RING,
        strategies=[StrategySetting.ZIGZAG, StrategySetting.AUTO],
        num_rounds=3,
        model="tiny",
        shard_linear=ShardLinear.BROADCAST,
        collectives=Collectives.TCP,
    )
    assert asked == [wanted]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--strategy", "zigag"], "--strategy: got 'zigag'; allowed: auto, none, whole_request, contiguous, zigzag"),
        (["--prompt-len", ""], "--prompt-len: got ''; allowed: integers"),
        (["--prompt-len", "0"], "--prompt-len: got 0; allowed: 1 or more"),
        (["--model", "GPT-5"], "--model: got 'GPT-5'; allowed: Llama-3-8B, "),
    ],
)
def test_invalid_options_are_refused_with_a_reason(options: list[str], words: str, asked: list[CpBench]) -> None:
    result = CliRunner().invoke(app, ["bench", "cp", *options])
    assert isinstance(result.exception, UserError)
    assert words in str(result.exception)
    assert asked == []


@pytest.mark.parametrize(("cp", "num_ways"), [(1, 2), (4, 3)])
def test_one_rank_alone_is_the_first_way_and_no_way_is_repeated(cp: int, num_ways: int) -> None:
    strategies = (StrategySetting.NONE, StrategySetting.AUTO, StrategySetting.AUTO)
    bench = CpBench(
        prompt_lens=(8,), prefix_len=0, cp=cp, mode=CpMode.RING, strategies=strategies, num_rounds=1, model="tiny"
    )
    alone, *group = bench.ways()
    assert alone == Way(cp=1, strategy=StrategySetting.NONE)
    assert (len(group), {way.cp for way in group}) == (num_ways - 1, {cp})


def test_the_slowest_rank_sets_the_time_and_the_busiest_the_exposed_share() -> None:
    choice = StrategyChoice(StepShape(strategy=Strategy.ZIGZAG, passing=Passing.PASS_Q), 1.5)
    way = Way(cp=2, strategy=StrategySetting.AUTO)
    alone = [[StepTime(3.0, 0.0)], [StepTime(6.0, 0.0)], [StepTime(5.0, 0.0)]]
    rounds = [
        [StepTime(2.0, 1.0, 0.8, 1 << 20), StepTime(1.0, 0.5, 0.4, 3 << 20)],
        [StepTime(4.0, 2.0, 1.0), StepTime(4.0, 0.0, 0.0)],
        [StepTime(1.0, 0.2, 0.1), StepTime(2.0, 0.2, 0.2)],
    ]
    assert summarize_way(way, 8, choice, rounds, alone) == CpResult(
        prompt_len=8,
        cp=2,
        strategy=StrategySetting.AUTO,
        chosen="zigzag pass_q",
        prefill_ms=2000.0,
        estimate_ms=1500.0,
        efficiency=0.75,
        received_mib=3.0,
        exposed_comm_share=0.1,
        exposed_projections_share=0.05,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt-len", "100000000000"], "100000000000 tokens of small on 2 ranks take 1.53e+06 GiB"),
        (["--model", "Llama-3-8B", "--prompt-len", "5"], "5 tokens of Llama-3-8B on 2 ranks take 29.9 GiB"),
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
