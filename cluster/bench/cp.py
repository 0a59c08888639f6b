"""`baton bench cp`: time of one prefill step for every way to compute it, in plain processes. Loads no torch.

Each round measures one rank alone and then every group, so that a machine whose speed drifts slows all of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from cluster.machine_memory import machine_memory
from cluster.spec.errors import UserError
from cluster.spec.kv import DTYPE_BYTES
from cluster.spec.memory import GIB
from cluster.spec.ranks import MOST_RANKS
from cluster.spec.strategy import CpMode, Passing, PassingSetting, Strategy, StrategySetting
from workers.bench.results import StepLens, StepTime, Way
from workers.bench.shapes import SHAPES
from workers.context_parallel.cost_model import StrategyChoice
from workers.models.interface import DecoderConfig
from workers.models.registry import parse_model_config
from workers.process import WorkerProcess

DTYPES = ("bfloat16", "float32")
_RANK = "workers.bench.cp_rank:CpBenchRank"


@dataclass(frozen=True, slots=True, kw_only=True)
class CpBench:
    """Options of one run. Raises UserError when a value is not allowed."""

    prompt_lens: Sequence[int]
    cps: Sequence[int]
    strategies: Sequence[StrategySetting]
    modes: Sequence[CpMode] = (CpMode.GATHER,)
    passings: Sequence[PassingSetting] = (PassingSetting.AUTO,)
    """Tensors that ring mode passes on."""
    prefix_lens: Sequence[int] = (0,)
    """Numbers of tokens that count as cached before the prompt."""
    num_rounds: int = 5
    model: str = "small"
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if min(self.prompt_lens) < 1:
            raise UserError(f"--prompt-len: got {min(self.prompt_lens)}; allowed: 1 or more")
        if min(self.prefix_lens) < 0:
            raise UserError(f"--prefix-len: got {min(self.prefix_lens)}; allowed: 0 or more")
        if wrong := [cp for cp in self.cps if not 1 <= cp <= MOST_RANKS]:
            raise UserError(f"--cp: got {wrong[0]}; allowed: 1 to {MOST_RANKS}")
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype: got {self.dtype!r}; allowed: {', '.join(DTYPES)}")
        if CpMode.RING not in self.modes and set(self.passings) != {PassingSetting.AUTO}:
            raise UserError(f"--passing: got {', '.join(self.passings)} with --mode gather; allowed: with --mode ring")
        if CpMode.RING in self.modes and max(self.cps) == 1:
            raise UserError("--mode: ring mode needs cp ≥ 2; got --cp 1")

    @property
    def lens(self) -> list[StepLens]:
        """All prompts, in order of measuring."""
        lens = [StepLens(prompt_len, prefix_len) for prefix_len in self.prefix_lens for prompt_len in self.prompt_lens]
        return list(dict.fromkeys(lens))

    @property
    def max_len(self) -> int:
        """Tokens of the longest prompt and prefix."""
        return max(lens.total for lens in self.lens)

    def ways(self) -> list[Way]:
        """Return the ways in order of measuring; the first is one rank alone, to which only ``cp`` applies."""
        groups = [
            Way(cp=cp, mode=mode, strategy=strategy, passing=passing)
            for cp in sorted({cp for cp in self.cps if cp > 1})
            for mode in self.modes
            for passing in (self.passings if mode is CpMode.RING else (None,))
            for strategy in self.strategies
        ]
        return list(dict.fromkeys([Way(cp=1), *groups]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CpResult:
    """One line of the output; times are medians over all rounds."""

    strategy: StrategySetting
    mode: CpMode
    passing: PassingSetting | None
    cp: int
    prompt_len: int
    prefix_len: int
    prefill_s: float
    """Time of the slowest rank from a common start to the first token."""
    efficiency: float
    """Time of one rank / (cp * time), the median of the ratios within a round: what slows a round slows both."""
    exposed_comm_share: float
    """Share of time inside collectives on the rank where it is least: others also wait for that rank's work."""
    kv_bytes_per_rank: int
    """Bytes of the request's pages on the rank that owns most of them."""
    chosen: Strategy
    """The strategy that ran."""
    chosen_passing: Passing | None
    estimate_s: float | None
    """Time that the cost model expects."""


def run_cp_bench(bench: CpBench) -> Iterator[CpResult]:
    """Yield the results of one prompt after another, by group size."""
    _check_memory(bench)
    config = parse_model_config(SHAPES[bench.model].config_json(bench.max_len) | {"dtype": bench.dtype})
    with _ranks(max(bench.cps)) as ranks:
        _start(ranks, config, bench)
        for lens in bench.lens:
            yield from _measure(bench, ranks, lens)


def _check_memory(bench: CpBench) -> None:
    """Refuse weights and KV that do not fit, since the ranks would be killed one by one."""
    num_ranks, available = max(bench.cps), machine_memory().available
    wanted = num_ranks * SHAPES[bench.model].decode_bytes(bench.max_len, DTYPE_BYTES[bench.dtype])
    if wanted > available:
        raise UserError(
            f"--prompt-len, --cp, --model: {bench.max_len} tokens on {num_ranks} ranks of {bench.model} take "
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


def _start(ranks: list[WorkerProcess], config: DecoderConfig, bench: CpBench) -> None:
    for number, rank in enumerate(ranks):
        rank.call("make", number, config, bench.max_len)
    for rank in ranks:
        rank.result()
    store = _ask(ranks[:1], "open_store")[0]
    for cp in sorted({1, *bench.cps}):
        _ask(ranks[:cp], "join", store, cp)


def _measure(bench: CpBench, ranks: list[WorkerProcess], lens: StepLens) -> list[CpResult]:
    ways = bench.ways()
    choices = {way: _ask(ranks[:1], "choose", way, lens)[0] for way in ways}
    # The first round sizes the buffers and does not count; every other round runs in reverse, to cancel effects of
    # order.
    rounds = [
        {way: _ask(ranks[: way.cp], "step", way, choices[way], lens) for way in ways[:: 1 if number % 2 else -1]}
        for number in range(1 + bench.num_rounds)
    ][1:]
    alone = [steps[ways[0]] for steps in rounds]
    return [
        summarize(
            way,
            lens,
            choices[way],
            [steps[way] for steps in rounds],
            alone,
            kv_bytes=_ask(ranks[:1], "kv_bytes", way, lens.total)[0],
        )
        for way in ways
        if way.cp in bench.cps
    ]


def _ask(ranks: Sequence[WorkerProcess], method: str, *args: Any) -> list[Any]:
    """Call all ranks at once; return every rank's result."""
    for rank in ranks:
        rank.call(method, *args)
    return [rank.result() for rank in ranks]


Steps = Sequence[list[StepTime]]
"""Times by round and rank."""


def summarize(
    way: Way, lens: StepLens, choice: StrategyChoice, steps: Steps, alone: Steps, *, kv_bytes: int
) -> CpResult:
    """Return the result of one way; ``alone`` are the rounds of one rank."""
    totals_s = [max(rank.seconds for rank in ranks) for ranks in steps]
    shares = [[rank.waited_s / total_s for rank in ranks] for ranks, total_s in zip(steps, totals_s, strict=True)]
    ratios = [single.seconds / (way.cp * total_s) for [single], total_s in zip(alone, totals_s, strict=True)]
    return CpResult(
        strategy=way.strategy,
        mode=way.mode,
        passing=way.passing,
        cp=way.cp,
        prompt_len=lens.prompt_len,
        prefix_len=lens.prefix_len,
        prefill_s=median(totals_s),
        efficiency=median(ratios),
        exposed_comm_share=median(min(ranks) for ranks in shares),
        kv_bytes_per_rank=kv_bytes,
        chosen=choice.shape.strategy,
        chosen_passing=choice.shape.passing,
        estimate_s=choice.estimate_s,
    )
