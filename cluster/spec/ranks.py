"""Arithmetic of one replica's ranks: axes, coordinates, groups, legality.

Attention orders the ranks of a pipeline stage by (dp, cp, tp), MoE layers by (moe_dp, ep, moe_tp); the last axis varies
fastest in both.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import gcd, prod
from operator import attrgetter

from cluster.spec.config import AnyParallel, Pool
from cluster.spec.errors import Problem
from cluster.spec.registry import AxisSizes, RankCoords

MOST_RANKS = 4096
"""Maximum number of workers per replica. Planning a larger number, most likely a typo, would exhaust memory."""
_ATTENTION_AXES = ("pp", "dp", "cp", "tp")


class GroupName(StrEnum):
    """Groups of ranks that run collectives together."""

    ATTN_TP = "attn_tp"
    ATTN_CP = "attn_cp"
    ATTN_DP = "attn_dp"
    MOE_DP = "moe_dp"
    MOE_EP = "moe_ep"
    MOE_TP = "moe_tp"
    MOE_BLOCK = "moe_block"
    """All ranks over which one copy of the experts is divided."""
    MOE_SHARDS = "moe_shards"
    """Ranks of a block with the same tp_rank: the attention shards whose tokens are gathered."""
    PP = "pp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """One rank's position on every axis."""

    global_rank: int
    dp: int
    cp: int
    tp: int
    pp: int
    moe_dp: int
    ep: int
    moe_tp: int

    @property
    def coords(self) -> RankCoords:
        return RankCoords(dp=self.dp, cp=self.cp, tp=self.tp, pp=self.pp)


_ALIKE = {
    GroupName.ATTN_TP: ("pp", "dp", "cp"),
    GroupName.ATTN_CP: ("pp", "dp", "tp"),
    GroupName.ATTN_DP: ("pp", "cp", "tp"),
    GroupName.MOE_DP: ("pp", "ep", "moe_tp"),
    GroupName.MOE_EP: ("pp", "moe_dp", "moe_tp"),
    GroupName.MOE_TP: ("pp", "moe_dp", "ep"),
    GroupName.MOE_BLOCK: ("pp", "moe_dp"),
    GroupName.MOE_SHARDS: ("pp", "moe_dp", "tp"),
    GroupName.PP: ("dp", "cp", "tp"),
}
"""Axes on which all members of a group have the same position."""


def sizes_of(parallel: AnyParallel) -> AxisSizes:
    return AxisSizes(dp=parallel.dp, cp=parallel.cp, tp=parallel.tp, pp=parallel.pp)


def stage_size(sizes: AxisSizes) -> int:
    """Return the number of ranks of one pipeline stage: dp*cp*tp."""
    return sizes.dp * sizes.cp * sizes.tp


def world_size(sizes: AxisSizes) -> int:
    """Return the number of ranks of one replica: dp*cp*tp*pp."""
    return stage_size(sizes) * sizes.pp


def num_workers(pool: Pool) -> int:
    """Return the number of workers of a role: the ranks of all its replicas."""
    return pool.replicas * world_size(sizes_of(pool.parallel))


def global_rank(coords: RankCoords, sizes: AxisSizes) -> int:
    """Return the global rank at a position.

    Raises:
        ValueError: a coordinate lies outside its axis.
    """
    for axis in _ATTENTION_AXES:
        coordinate, size = getattr(coords, axis), getattr(sizes, axis)
        if not 0 <= coordinate < size:
            raise ValueError(f"{axis}_rank {coordinate} is out of range; allowed: 0 to {size - 1}")
    rank_in_stage = (coords.dp * sizes.cp + coords.cp) * sizes.tp + coords.tp
    return coords.pp * stage_size(sizes) + rank_in_stage


def coords_of(rank: int, sizes: AxisSizes) -> RankCoords:
    """Return the position of a global rank.

    Raises:
        ValueError: the replica has no such rank.
    """
    if not 0 <= rank < world_size(sizes):
        raise ValueError(f"global rank {rank} is outside its replica; allowed: 0 to {world_size(sizes) - 1}")
    pp_rank, dp_rank, cp_rank, tp_rank = _split(rank, (sizes.pp, sizes.dp, sizes.cp, sizes.tp))
    return RankCoords(dp=dp_rank, cp=cp_rank, tp=tp_rank, pp=pp_rank)


def moe_tp_size(parallel: AnyParallel) -> int:
    """Return the number of ranks over which an expert is split: dp*cp*tp / (moe_dp*ep); requires legal axes."""
    size, rest = divmod(stage_size(sizes_of(parallel)), parallel.moe_dp * parallel.ep)
    assert rest == 0, f"axes that axis_problems rejects: {parallel}"
    return size


def num_expert_shards(parallel: AnyParallel) -> int:
    """Return the number of attention shards whose ranks together hold one copy of the experts: dp*cp / moe_dp."""
    return parallel.dp * parallel.cp // parallel.moe_dp


def positions(parallel: AnyParallel) -> list[Position]:
    """Return the positions of all ranks, by global rank; requires legal axes."""
    sizes = sizes_of(parallel)
    attention_sizes = (sizes.pp, sizes.dp, sizes.cp, sizes.tp)
    moe_sizes = (parallel.pp, parallel.moe_dp, parallel.ep, moe_tp_size(parallel))
    ranks = []
    for rank in range(world_size(sizes)):
        pp, dp, cp, tp = _split(rank, attention_sizes)
        _, moe_dp, ep, moe_tp = _split(rank, moe_sizes)
        ranks.append(Position(global_rank=rank, dp=dp, cp=cp, tp=tp, pp=pp, moe_dp=moe_dp, ep=ep, moe_tp=moe_tp))
    return ranks


def groups(parallel: AnyParallel) -> dict[GroupName, list[list[int]]]:
    """Return all groups as ascending global ranks, ordered by first member; requires legal axes."""
    ranks = positions(parallel)
    return {name: _group(ranks, attrgetter(*alike)) for name, alike in _ALIKE.items()}


def stage_links(parallel: AnyParallel, rank: int) -> list[tuple[int, int]]:
    """Return a rank's links (from, to) with neighbouring stages, which carry hidden states."""
    line = next(members for members in groups(parallel)[GroupName.PP] if rank in members)
    return [link for link in pairwise(line) if rank in link]


def axis_problems(parallel: AnyParallel, path: str) -> list[Problem]:
    """Return the reasons why the axes of one replica are illegal; ``path`` is their section of the file."""
    problems = []
    sizes = sizes_of(parallel)
    stage = stage_size(sizes)
    if world_size(sizes) > MOST_RANKS:
        product = f"{sizes.dp}*{sizes.cp}*{sizes.tp}*{sizes.pp} = {world_size(sizes)}"
        problems.append(Problem(path, f"got dp*cp*tp*pp = {product} workers; allowed: up to {MOST_RANKS} per replica"))
    if stage % (parallel.moe_dp * parallel.ep):
        problems.append(
            Problem(
                path,
                f"moe_dp*ep = {parallel.moe_dp}*{parallel.ep} = {parallel.moe_dp * parallel.ep} does not divide "
                f"dp*cp*tp = {parallel.dp}*{parallel.cp}*{parallel.tp} = {stage}; "
                "the experts use the ranks that attention uses",
            )
        )
    if parallel.moe_dp not in (1, parallel.cp):
        allowed = "1" if parallel.cp == 1 else f"1 or cp = {parallel.cp}"
        problems.append(Problem(f"{path}.moe_dp", f"got {parallel.moe_dp} with cp = {parallel.cp}; allowed: {allowed}"))
    if parallel.moe_dp > 1 and parallel.pp > 1:
        problems.append(
            Problem(
                f"{path}.moe_dp",
                f"got {parallel.moe_dp} with pp = {parallel.pp}; moe_dp and pp cannot both be more than 1",
            )
        )
    return problems


def stage_layers(num_layers: int, pp_size: int, pp_rank: int) -> range:
    """Return the consecutive layers of one pipeline stage; the last ``num_layers % pp_size`` stages hold one more.

    Late stages get the remainder because the model's last layer computes little more than K and V for a prompt.
    """
    base, rest = divmod(num_layers, pp_size)
    num_smaller = pp_size - rest
    first = pp_rank * base + max(0, pp_rank - num_smaller)
    return range(first, first + base + (pp_rank >= num_smaller))


def kv_heads_of(num_kv_heads: int, tp_size: int, tp_rank: int) -> range:
    """Return the KV heads of one TP rank: an equal part, or one head that several ranks share.

    Raises:
        ValueError: neither number divides the other.
    """
    if num_kv_heads % tp_size == 0:
        part = num_kv_heads // tp_size
        return range(tp_rank * part, (tp_rank + 1) * part)
    if tp_size % num_kv_heads == 0:
        head = tp_rank * num_kv_heads // tp_size
        return range(head, head + 1)
    raise ValueError(
        f"{num_kv_heads} KV heads cannot be divided among tp = {tp_size} ranks; one number must divide the other"
    )


def head_copies(num_heads: Iterable[int], tp_size: int) -> int:
    """Return how many adjacent TP ranks hold the same heads of every KV group.

    Args:
        num_heads: number of heads of each group.
    """
    return gcd(*(max(1, tp_size // count) for count in num_heads))


def head_copy_groups(ranks: Sequence[Position], num_heads: Iterable[int]) -> list[list[int]]:
    """Return the ranks of a replica that hold the same heads, tokens and layers, in the order of `groups`."""
    copies = head_copies(num_heads, len({position.tp for position in ranks}))
    return _group(ranks, lambda rank: (rank.pp, rank.dp, rank.cp, rank.tp // copies))


def _split(rank: int, sizes: tuple[int, ...]) -> list[int]:
    """Return the digits of a rank in the mixed radix of the sizes; the last digit varies fastest."""
    return [rank // prod(sizes[axis + 1 :]) % size for axis, size in enumerate(sizes)]


def _group(ranks: Sequence[Position], key: Callable[[Position], object]) -> list[list[int]]:
    members: dict[object, list[int]] = {}
    for position in ranks:
        members.setdefault(key(position), []).append(position.global_rank)
    return list(members.values())
