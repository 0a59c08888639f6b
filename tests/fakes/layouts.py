"""Legal ways to cut a replica, and few of them that bring every two axes together."""

from collections.abc import Sequence
from itertools import combinations, product

from cluster.spec.config import ParallelConfig
from cluster.spec.ranks import axis_problems, moe_tp_size, sizes_of, world_size

AXES = ("dp", "cp", "tp", "pp", "ep", "moe_dp", "moe_tp")


def legal_layouts(most_ranks: int, *, is_decode: bool = False) -> list[ParallelConfig]:
    """Every legal one with at most two ranks on each attention axis."""
    twos = (1, 2)
    found = []
    for dp, cp, tp, pp, ep, moe_dp in product(twos, (1,) if is_decode else twos, twos, twos, (1, 2, 4), twos):
        parallel = ParallelConfig(dp=dp, cp=cp, tp=tp, pp=pp, ep=ep, moe_dp=moe_dp)
        if world_size(sizes_of(parallel)) <= most_ranks and not axis_problems(parallel, ""):
            found.append(parallel)
    return found


def divided(parallel: ParallelConfig) -> frozenset[str]:
    """The axes that have several ranks; those of experts only where there are experts to divide."""
    sizes = {axis: getattr(parallel, axis) for axis in AXES[:-1]} | {"moe_tp": moe_tp_size(parallel)}
    return frozenset(axis for axis in AXES if sizes[axis] > 1)


def covering_pairs(layouts: Sequence[ParallelConfig]) -> list[ParallelConfig]:
    """Few of the layouts, in which every two axes are divided together that are so in any of them."""
    missing = {pair for layout in layouts for pair in _pairs(layout)}
    chosen = []
    while missing:
        best = max(layouts, key=lambda layout: (len(_pairs(layout) & missing), -world_size(sizes_of(layout))))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def needs_experts(parallel: ParallelConfig) -> bool:
    """Whether only a model with experts can be cut so."""
    return parallel.ep > 1 or parallel.moe_dp > 1


def _pairs(parallel: ParallelConfig) -> set[tuple[str, str]]:
    return set(combinations(sorted(divided(parallel)), 2))
