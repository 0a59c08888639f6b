"""Legal layouts of a replica, and small selections that combine every two traits."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import TypeVar

from cluster.spec.config import ParallelConfig
from cluster.spec.ranks import axis_problems, moe_tp_size, sizes_of, world_size

T = TypeVar("T")

AXES = ("dp", "cp", "tp", "pp", "ep", "moe_dp", "moe_tp")


def legal_layouts(most_ranks: int, *, is_decode: bool = False) -> list[ParallelConfig]:
    """Return every legal layout with at most two ranks on each attention axis."""
    twos = (1, 2)
    found = []
    for dp, cp, tp, pp, ep, moe_dp in product(twos, (1,) if is_decode else twos, twos, twos, (1, 2, 4), twos):
        parallel = ParallelConfig(dp=dp, cp=cp, tp=tp, pp=pp, ep=ep, moe_dp=moe_dp)
        if num_ranks(parallel) <= most_ranks and not axis_problems(parallel, ""):
            found.append(parallel)
    return found


WIDE = [
    ParallelConfig(tp=4),
    ParallelConfig(tp=4, pp=2, ep=4),
    ParallelConfig(cp=2, tp=4, ep=8),
    ParallelConfig(dp=2, tp=4),
    ParallelConfig(cp=3),
    ParallelConfig(cp=3, tp=2),
    ParallelConfig(cp=3, pp=2),
    ParallelConfig(cp=3, moe_dp=3),
    ParallelConfig(cp=4, ep=2),
    ParallelConfig(dp=3),
    ParallelConfig(dp=3, tp=2, ep=2),
    ParallelConfig(dp=2, cp=2, tp=2, ep=8),
    ParallelConfig(pp=3),
]
"""Some layouts with more ranks on an axis. Models need four heads, eight experts and three layers."""


def num_ranks(parallel: ParallelConfig) -> int:
    return world_size(sizes_of(parallel))


def divided(parallel: ParallelConfig, *, has_experts: bool) -> frozenset[str]:
    """Return the axes with several ranks. Expert axes count only if there are experts."""
    sizes = {axis: getattr(parallel, axis) for axis in AXES[:-1]} | {"moe_tp": moe_tp_size(parallel)}
    return frozenset(axis for axis in (AXES if has_experts else AXES[:4]) if sizes[axis] > 1)


def covering_pairs(items: Sequence[T], traits: Callable[[T], frozenset[str]]) -> list[T]:
    """Return few items that contain every pair of traits found in any item. Ties go to earlier items."""
    pairs = [set(combinations(sorted(traits(item)), 2)) for item in items]
    missing = set[tuple[str, str]]().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(items)), key=lambda index: len(pairs[index] & missing))
        chosen.append(items[best])
        missing -= pairs[best]
    return chosen


def needs_experts(parallel: ParallelConfig) -> bool:
    """Return whether the layout requires a model with experts."""
    return parallel.ep > 1 or parallel.moe_dp > 1
