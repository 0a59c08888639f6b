"""What `baton bench cp` reports, from the times of all ranks in all rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cluster.spec.strategy import CpMode, Passing, PassingSetting, Strategy, StrategySetting
from workers.bench_step import StepLens, StepTime, Way
from workers.context_parallel.cost_model import Choice


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
    """Of the slowest rank, from a common start to the first token."""
    efficiency: float
    """Time of one rank / (cp * time), median of the rounds' own ratios: what slows a round slows both."""
    attention_efficiency: float
    """The same of the time inside attention, on the rank that spends most there."""
    exposed_comm_share: float
    """Part of the time inside collectives, on the rank where it is least: others also wait for that one's work."""
    kv_bytes_per_rank: int
    """Of the pages that hold the request on the rank that owns most of them, by the owner rule."""
    wait_shares: tuple[float, ...]
    """Part of the time inside collectives, by rank."""
    cpu_s: float
    """Computing time of the slowest rank; unlike prefill_s hardly disturbed by what else runs on the machine."""
    chosen: Strategy
    """What ran."""
    chosen_passing: Passing | None
    estimate_s: float | None
    """Expected time of it."""


Steps = Sequence[list[StepTime]]
"""By round and rank."""


def summarize(way: Way, lens: StepLens, choice: Choice, steps: Steps, alone: Steps) -> dict[str, Any]:
    """The fields of a result that follow from the rounds; ``alone`` are those of one rank."""
    totals_s = [_slowest(ranks, "seconds") for ranks in steps]
    shares = [[rank.waited_s / total_s for rank in ranks] for ranks, total_s in zip(steps, totals_s, strict=True)]
    return {
        "strategy": way.strategy,
        "mode": way.mode,
        "passing": way.passing,
        "cp": way.cp,
        "prompt_len": lens.prompt_len,
        "prefix_len": lens.prefix_len,
        "prefill_s": median(totals_s),
        "efficiency": _efficiency(way, steps, alone, "seconds"),
        "attention_efficiency": _efficiency(way, steps, alone, "attention_s"),
        "exposed_comm_share": median(min(ranks) for ranks in shares),
        "wait_shares": tuple(median(of_rank) for of_rank in zip(*shares, strict=True)),
        "cpu_s": median(_slowest(ranks, "cpu_s") for ranks in steps),
        "chosen": choice.strategy,
        "chosen_passing": choice.passing,
        "estimate_s": choice.estimate_s,
    }


def _efficiency(way: Way, steps: Steps, alone: Steps, part: str) -> float:
    rounds = zip(steps, alone, strict=True)
    return median(_slowest(single, part) / (way.cp * _slowest(ranks, part)) for ranks, single in rounds)


def _slowest(ranks: Sequence[StepTime], part: str) -> float:
    return max(float(getattr(rank, part)) for rank in ranks)
