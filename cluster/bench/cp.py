"""Benchmark of one prefill step with each CP strategy, in plain processes. This module does not load torch.

Each round measures one rank alone and then the group, so that a change in the machine's speed affects both.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import truediv
from statistics import median
from typing import Any

from cluster.machine_memory import machine_memory
from cluster.spec.errors import UserError
from cluster.spec.kv import DTYPE_BYTES
from cluster.spec.memory import GIB
from cluster.spec.strategy import Collectives, CpMode, ShardLinear, StrategySetting
from workers.bench.process import WorkerProcess
from workers.bench.results import StepTime, Way
from workers.bench.shapes import config_json
from workers.context_parallel.strategy_chooser import StrategyChoice
from workers.models.interface import DecoderConfig
from workers.models.registry import parse_model_config

_DTYPE = "bfloat16"
_MIB = 1 << 20
_RANK = "workers.bench.cp_rank:CpBenchRank"


@dataclass(frozen=True, slots=True, kw_only=True)
class CpBench:
    prompt_lens: Sequence[int]
    prefix_len: int
    """Number of cached tokens before each prompt."""
    cp: int
    mode: CpMode
    strategies: Sequence[StrategySetting]
    num_rounds: int
    model: str
    shard_linear: ShardLinear = ShardLinear.NONE
    collectives: Collectives = Collectives.AUTO

    @property
    def max_len(self) -> int:
        return self.prefix_len + max(self.prompt_lens)

    def ways(self) -> list[Way]:
        """Return the configurations to measure, in order. The first is a single rank."""
        group = [Way(cp=self.cp, strategy=strategy) for strategy in self.strategies]
        return list(dict.fromkeys([Way(cp=1, strategy=StrategySetting.NONE), *group]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CpResult:
    """Result for one configuration and prompt length. Measured values are medians over the rounds."""

    prompt_len: int
    cp: int
    strategy: StrategySetting
    chosen: str
    """Strategy that ran, and the tensors passed around in ring mode."""
    prefill_ms: float
    """The slowest rank's time from the common start to the first token."""
    estimate_ms: float | None
    efficiency: float
    """Time of one rank alone, divided by cp times the group's time."""
    received_mib: float
    """MiB that the busiest rank receives from others in the step."""
    exposed_comm_share: float
    """Fraction of the step that the least-waiting rank spends in collectives; other ranks also wait for its work."""
    exposed_projections_share: float
    """Fraction of the step that the least-waiting rank spends on projections of other ranks (`--shard-linear`)."""


def run_cp_bench(bench: CpBench) -> Iterator[CpResult]:
    """Yield the results in order of prompt length.

    Raises:
        UserError: the model and its KV do not fit in memory.
    """
    config = parse_model_config(config_json(bench.model, bench.max_len) | {"dtype": _DTYPE})
    _check_memory(bench, config)
    with _ranks(bench.cp) as ranks:
        _ask(ranks, "make", config, bench.max_len, bench.mode, bench.shard_linear, bench.collectives)
        store = _ask(ranks[:1], "open_store")[0]
        for cp in sorted({1, bench.cp}):
            for number, rank in enumerate(ranks[:cp]):
                rank.call("join", store, number, cp)
            for rank in ranks[:cp]:
                rank.result()
        for prompt_len in bench.prompt_lens:
            yield from _measure(bench, ranks, prompt_len)


def _check_memory(bench: CpBench, config: DecoderConfig) -> None:
    """Check that weights and KV fit in memory. The operating system would kill the ranks otherwise."""
    available = machine_memory().available
    num_weights = config.num_weights * DTYPE_BYTES[_DTYPE]
    kv = config.kv_geometry("bench", _DTYPE, 1).bytes_per_token * bench.max_len
    wanted = bench.cp * (num_weights + kv)
    if wanted > available:
        raise UserError(
            f"--prompt-len, --cp, --model: {bench.max_len} tokens of {bench.model} on {bench.cp} ranks take "
            f"{wanted / GIB:.3g} GiB; allowed: at most {available / GIB:.3g} GiB"
        )


@contextmanager
def _ranks(count: int) -> Iterator[list[WorkerProcess]]:
    ranks = [WorkerProcess(_RANK) for _ in range(count)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.stop()
        for rank in ranks:
            rank.close()


def _measure(bench: CpBench, ranks: list[WorkerProcess], prompt_len: int) -> list[CpResult]:
    ways, lens = bench.ways(), (prompt_len, bench.prefix_len)
    choices = {way: _ask(ranks[:1], "choose", way, *lens)[0] for way in ways}
    # The first round allocates the buffers and is not counted. Every second round is reversed to cancel order effects.
    rounds = [
        {way: _ask(ranks[: way.cp], "step", way, choices[way], *lens) for way in ways[:: 1 if number % 2 else -1]}
        for number in range(1 + bench.num_rounds)
    ][1:]
    alone = [steps[ways[0]] for steps in rounds]
    return [summarize_way(way, prompt_len, choices[way], [steps[way] for steps in rounds], alone) for way in ways]


def _ask(ranks: Sequence[WorkerProcess], method: str, *args: Any) -> list[Any]:
    for rank in ranks:
        rank.call(method, *args)
    return [rank.result() for rank in ranks]


Steps = Sequence[list[StepTime]]


def summarize_way(way: Way, prompt_len: int, choice: StrategyChoice, steps: Steps, alone: Steps) -> CpResult:
    """Return the result for one configuration; ``alone`` has the steps of a single rank in the same rounds."""
    totals_s = [max(rank.seconds for rank in ranks) for ranks in steps]
    waits_s = [min(rank.waited_s for rank in ranks) for ranks in steps]
    projections_s = [min(rank.projections_s for rank in ranks) for ranks in steps]
    ratios = [single.seconds / (way.cp * total_s) for [single], total_s in zip(alone, totals_s, strict=True)]
    return CpResult(
        prompt_len=prompt_len,
        cp=way.cp,
        strategy=way.strategy,
        chosen=" ".join(filter(None, (choice.shape.strategy, choice.shape.passing))),
        prefill_ms=median(totals_s) * 1e3,
        estimate_ms=None if choice.estimate_s is None else choice.estimate_s * 1e3,
        efficiency=median(ratios),
        received_mib=max(rank.received_bytes for ranks in steps for rank in ranks) / _MIB,
        exposed_comm_share=median(map(truediv, waits_s, totals_s)),
        exposed_projections_share=median(map(truediv, projections_s, totals_s)),
    )
