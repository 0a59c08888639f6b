"""Estimate of which way of bringing tokens to experts moves less. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.spec.strategy import MoeDispatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The ranks that share one copy of the experts, as shards * tp and as ep * moe_tp."""

    shards: int
    tp: int
    ep: int
    moe_tp: int
    top_k: int
    """Experts of one token."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.shards * self.tp


def cheaper_dispatch(shape: BlockShape, lens: Sequence[int] | None) -> MoeDispatch:
    """Return the way in which the busiest rank receives fewer tokens' hidden states.

    ``lens`` are the tokens of each shard; None if all have the same ones.
    """
    moved = {MoeDispatch.GATHER: _gathered(shape, lens), MoeDispatch.ALL_TO_ALL: _sent(shape, lens)}
    return min(moved, key=lambda way: moved[way])


def _gathered(shape: BlockShape, lens: Sequence[int] | None) -> float:
    """Gather all tokens, scatter the sums back to their shards, and add up those of TP ranks."""
    if lens is None:
        return 2 * _others(shape.shards) + 2 * _others(shape.tp)
    longest = max(lens)
    return sum(lens) - longest + (shape.shards - 1) * longest + 2 * _others(shape.tp) * longest


def _sent(shape: BlockShape, lens: Sequence[int] | None) -> float:
    """Send a part of the tokens to their experts and back, then gather the parts of ranks with the same tokens."""
    longest, alike = (1, shape.size) if lens is None else (max(lens), shape.tp)
    copies = shape.moe_tp * shape.ep * (1 - (1 - 1 / shape.ep) ** shape.top_k)
    return longest * (2 * copies * _others(shape.size) / alike + _others(alike))


def _others(size: int) -> float:
    """Return the part of something evenly divided that is on the other ranks."""
    return (size - 1) / size
