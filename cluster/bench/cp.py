"""`baton bench cp`: the time of one prefill step for strategies and group sizes, in plain processes. Loads no torch.

Every round measures one rank alone and then every group, so that a machine whose speed drifts slows all of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from cluster.spec.errors import UserError
from cluster.spec.strategy import Strategy, StrategySetting
from workers.bench_step import StepTime
from workers.context_parallel.cost_model import Choice
from workers.local import WorkerProcess
from workers.models.config import ModelConfig

_RANK = "workers.bench_rank:BenchRank"
MODE = "gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A Qwen3-like decoder with random weights."""

    num_layers: int = 8
    hidden_size: int = 512
    intermediate_size: int = 1536
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    vocab_size: int = 4096
    dtype: str = "bfloat16"

    def config(self, max_len: int) -> ModelConfig:
        """The model's configuration; raises UnsupportedModelError when it cannot be."""
        raw = {
            "architectures": ["Qwen3ForCausalLM"],
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "dtype": self.dtype,
            "max_position_embeddings": max_len,
        }
        return ModelConfig.from_mapping(raw, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class CpBench:
    """One benchmark run. Raises UserError when a value makes no sense."""

    prompt_lens: tuple[int, ...]
    cps: tuple[int, ...]
    strategies: tuple[StrategySetting, ...]
    prefix_len: int = 0
    """Tokens that count as cached before the prompt."""
    num_rounds: int = 5
    model: ModelSize = ModelSize()

    def __post_init__(self) -> None:
        for name in ("prompt_lens", "cps", "strategies"):
            if not getattr(self, name):
                raise UserError(f"{name} is empty, must name at least one")
        least = {"prompt_lens": min(self.prompt_lens), "cps": min(self.cps), "num_rounds": self.num_rounds}
        for name, value in least.items():
            if value < 1:
                raise UserError(f"{name}: got {value}, must be at least 1")
        if self.prefix_len < 0:
            raise UserError(f"prefix_len is {self.prefix_len}, must be at least 0")

    @property
    def max_len(self) -> int:
        """Most tokens that one request comes to."""
        return self.prefix_len + max(self.prompt_lens)

    def entries(self) -> list[tuple[int, StrategySetting]]:
        """(cp, strategy) in order of measuring. The first is one rank alone, to which strategies mean nothing."""
        groups = sorted({cp for cp in self.cps if cp > 1})
        return [(1, StrategySetting.NONE), *((cp, strategy) for cp in groups for strategy in self.strategies)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpResult:
    """One line of the output; times are medians over all rounds."""

    strategy: StrategySetting
    mode: str
    cp: int
    prompt_len: int
    prefix_len: int
    prefill_s: float
    """Of the slowest rank, from a common start to the first token."""
    efficiency: float
    """prefill_s of one rank / (cp * prefill_s)."""
    exposed_comm_share: float
    """Part of the time inside collectives, on the rank where it is least: others also wait for that one's work."""
    kv_bytes_per_rank: int
    wait_shares: tuple[float, ...]
    """Part of the time inside collectives, by rank."""
    cpu_s: float
    """Computing time of the slowest rank; unlike prefill_s hardly disturbed by what else runs on the machine."""
    chosen: Strategy
    """What ran."""
    estimate_s: float
    """Expected time of it."""


def run_cp_bench(bench: CpBench) -> Iterator[CpResult]:
    """Measure; yields the results of one prompt length after another, by group size."""
    config = bench.model.config(bench.max_len)
    with _ranks(max(bench.cps)) as ranks:
        _start(ranks, config, bench)
        for prompt_len in bench.prompt_lens:
            yield from _measure(bench, ranks, prompt_len)


def summarize(
    bench: CpBench, entry: tuple[int, StrategySetting], prompt_len: int, choice: Choice, steps: Sequence[list[StepTime]]
) -> dict[str, Any]:
    """The fields that follow from one entry's own rounds; each round has the times of all ranks."""
    cp, strategy = entry
    totals_s = [max(rank.seconds for rank in ranks) for ranks in steps]
    shares = [[rank.waited_s / total_s for rank in ranks] for ranks, total_s in zip(steps, totals_s, strict=True)]
    return {
        "strategy": strategy,
        "mode": MODE,
        "cp": cp,
        "prompt_len": prompt_len,
        "prefix_len": bench.prefix_len,
        "prefill_s": median(totals_s),
        "exposed_comm_share": median(min(ranks) for ranks in shares),
        "wait_shares": tuple(median(of_rank) for of_rank in zip(*shares, strict=True)),
        "cpu_s": median(max(rank.cpu_s for rank in ranks) for ranks in steps),
        "chosen": choice.strategy,
        "estimate_s": choice.estimates_s[choice.strategy],
    }


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


def _start(ranks: list[WorkerProcess], config: ModelConfig, bench: CpBench) -> None:
    for number, rank in enumerate(ranks):
        rank.call("make", number, config, bench.max_len)
    for rank in ranks:
        rank.result()
    store = _ask(ranks[:1], "open_store")[0]
    for cp in sorted({1, *bench.cps}):
        _ask(ranks[:cp], "join", store, cp)


def _measure(bench: CpBench, ranks: list[WorkerProcess], prompt_len: int) -> list[CpResult]:
    entries = bench.entries()
    choices = {entry: _ask(ranks[:1], "choose", *entry, prompt_len, bench.prefix_len)[0] for entry in entries}
    rounds = [
        {
            entry: _ask(ranks[: entry[0]], "step", entry[0], choices[entry].strategy, prompt_len, bench.prefix_len)
            for entry in entries
        }
        for _ in range(1 + bench.num_rounds)
    ]
    kv_bytes: int = _ask(ranks[:1], "kv_bytes", bench.prefix_len + prompt_len)[0]
    # The first round sizes the buffers and is not counted.
    fields = {
        entry: summarize(bench, entry, prompt_len, choices[entry], [steps[entry] for steps in rounds[1:]])
        for entry in entries
    }
    alone_s = fields[entries[0]]["prefill_s"]
    return [
        CpResult(**values, efficiency=alone_s / (values["cp"] * values["prefill_s"]), kv_bytes_per_rank=kv_bytes)
        for values in fields.values()
        if values["cp"] in bench.cps
    ]


def _ask(ranks: Sequence[WorkerProcess], method: str, *args: Any) -> list[Any]:
    """Call all at once; every rank's answer."""
    for rank in ranks:
        rank.call(method, *args)
    return [rank.result() for rank in ranks]
