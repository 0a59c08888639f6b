"""`baton bench cp`: the time of one prefill step for every way to compute it, in plain processes. Loads no torch.

Every round measures one rank alone and then every group, so that a machine whose speed drifts slows all of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cluster.bench.cp_result import CpResult, summarize
from cluster.bench.model_size import ModelSize
from cluster.machine_memory import machine_memory
from cluster.spec.errors import UserError
from cluster.spec.kv import KvGeometry
from cluster.spec.pool import GIB
from cluster.spec.ranks import MOST_RANKS
from cluster.spec.strategy import Collectives, CpMode, PassingSetting, StrategySetting
from workers.bench_step import StepLens, Way
from workers.models.interface import DecoderConfig
from workers.worker_process import WorkerProcess

_RANK = "workers.bench_rank:BenchRank"
_PROCESS_BYTES = 24 << 20
"""What a rank takes beside weights and KV, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpBench:
    """One benchmark run. Raises UserError when a value makes no sense."""

    prompt_lens: tuple[int, ...]
    cps: tuple[int, ...]
    strategies: tuple[StrategySetting, ...]
    modes: tuple[CpMode, ...] = (CpMode.GATHER,)
    passings: tuple[PassingSetting, ...] = (PassingSetting.AUTO,)
    """Of ring mode."""
    prefix_lens: tuple[int, ...] = (0,)
    """Tokens that count as cached before the prompt."""
    collectives: Collectives = Collectives.AUTO
    num_rounds: int = 5
    model: ModelSize = field(default_factory=ModelSize)

    def __post_init__(self) -> None:
        least = {"prompt-len": min(self.prompt_lens), "cp": min(self.cps), "rounds": self.num_rounds}
        for name, value in least.items():
            if value < 1:
                raise UserError(f"--{name}: got {value}; allowed: 1 or more")
        if max(self.cps) > MOST_RANKS:
            raise UserError(f"--cp: got {max(self.cps)}; allowed: at most {MOST_RANKS}, the workers of a replica")
        if min(self.prefix_lens) < 0:
            raise UserError(f"--prefix-len: got {min(self.prefix_lens)}; allowed: 0 or more")
        if CpMode.RING not in self.modes and self.passings != (PassingSetting.AUTO,):
            raise UserError(
                f"--passing: got {', '.join(self.passings)} with --mode gather; only ring mode has a passing"
            )
        if CpMode.RING in self.modes and max(self.cps) == 1:
            raise UserError("--mode: got ring with --cp 1; one rank is no ring")

    @property
    def lens(self) -> list[StepLens]:
        """All prompts, in order of measuring."""
        lens = [StepLens(prompt_len, prefix_len) for prefix_len in self.prefix_lens for prompt_len in self.prompt_lens]
        return list(dict.fromkeys(lens))

    def ways(self) -> list[Way]:
        """In order of measuring. The first is one rank alone, to which nothing else means anything."""
        groups = [
            Way(cp=cp, mode=mode, strategy=strategy, passing=passing)
            for cp in sorted({cp for cp in self.cps if cp > 1})
            for mode in self.modes
            for passing in (self.passings if mode is CpMode.RING else (None,))
            for strategy in self.strategies
        ]
        return list(dict.fromkeys([Way(cp=1), *groups]))


def run_cp_bench(bench: CpBench) -> Iterator[CpResult]:
    """Measure; yields the results of one prompt after another, by group size."""
    max_len = max(lens.total for lens in bench.lens)
    _check_memory(bench, max_len)
    config = bench.model.config(max_len)
    with _ranks(max(bench.cps)) as ranks:
        _start(ranks, config, bench)
        for lens in bench.lens:
            yield from _measure(bench, ranks, lens)


def _check_memory(bench: CpBench, max_len: int) -> None:
    model, num_ranks = bench.model, max(bench.cps)
    geometry = KvGeometry(
        model="random",
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=model.dtype,
        page_size=1,
    )
    available, ranks_bytes = machine_memory().available, num_ranks * (_PROCESS_BYTES + model.weight_bytes)
    if ranks_bytes > available:
        raise UserError(
            f"--cp, --layers: got {num_ranks} and {model.num_layers}, which take {ranks_bytes / GIB:.3g} GiB without "
            f"a prompt; allowed: what fits into {available / GIB:.3g} GiB"
        )
    wanted, left = num_ranks * max_len * geometry.bytes_per_token, available - ranks_bytes
    if wanted > left:
        raise UserError(
            f"--prompt-len: got {max_len} tokens, whose KV takes {wanted / GIB:.3g} GiB in {num_ranks} processes; "
            f"allowed: what fits into {left / GIB:.3g} GiB"
        )


@contextmanager
def _ranks(count: int) -> Iterator[list[WorkerProcess]]:
    ranks: list[WorkerProcess] = []
    try:
        while len(ranks) < count:
            ranks.append(WorkerProcess(_RANK))
        yield ranks
    finally:
        for rank in ranks:
            rank.stop()
        for rank in ranks:
            rank.close()


def _start(ranks: list[WorkerProcess], config: DecoderConfig, bench: CpBench) -> None:
    for number, rank in enumerate(ranks):
        rank.call("make", number, config, max(lens.total for lens in bench.lens))
    for rank in ranks:
        rank.result()
    store = _ask(ranks[:1], "open_store")[0]
    for cp in sorted({1, *bench.cps}):
        _ask(ranks[:cp], "join", store, cp, bench.collectives)


def _measure(bench: CpBench, ranks: list[WorkerProcess], lens: StepLens) -> list[CpResult]:
    ways = bench.ways()
    choices = {way: _ask(ranks[:1], "choose", way, lens)[0] for way in ways}
    # The first round sizes the buffers and is not counted; every other one goes backwards, so that order tells nothing.
    rounds = [
        {way: _ask(ranks[: way.cp], "step", way, choices[way], lens) for way in ways[:: 1 if number % 2 else -1]}
        for number in range(1 + bench.num_rounds)
    ][1:]
    alone = [steps[ways[0]] for steps in rounds]
    return [
        CpResult(
            **summarize(way, lens, choices[way], [steps[way] for steps in rounds], alone),
            kv_bytes_per_rank=_ask(ranks[:1], "kv_bytes", way, lens.total)[0],
        )
        for way in ways
        if way.cp in bench.cps
    ]


def _ask(ranks: Sequence[WorkerProcess], method: str, *args: Any) -> list[Any]:
    """Call all at once; every rank's answer."""
    for rank in ranks:
        rank.call(method, *args)
    return [rank.result() for rank in ranks]
