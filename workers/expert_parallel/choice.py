"""Which way of bringing tokens to experts moves fewer rows. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.spec.strategy import MoeDispatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The ranks that share one copy of the experts: seen as shards * tp, and as ep * moe_tp."""

    shards: int
    tp: int
    ep: int
    moe_tp: int
    top_k: int
    """Experts of one token."""

    @property
    def size(self) -> int:
        """Ranks."""
        return self.shards * self.tp


def fewer_rows(shape: BlockShape, lens: Sequence[int] | None) -> MoeDispatch:
    """The way in which the rank with most tokens receives fewer rows; ``lens`` of the shards, None for equal tokens."""
    moved = {MoeDispatch.GATHER: _gathered(shape, lens), MoeDispatch.ALL_TO_ALL: _sent(shape, lens)}
    return min(moved, key=lambda way: moved[way])


def _gathered(shape: BlockShape, lens: Sequence[int] | None) -> float:
    """All tokens come, the sums of this rank's own come home, and TP ranks add theirs up."""
    if lens is None:
        return 2 * _others(shape.shards) + 2 * _others(shape.tp)
    longest = max(lens)
    return sum(lens) - longest + (shape.shards - 1) * longest + 2 * _others(shape.tp) * longest


def _sent(shape: BlockShape, lens: Sequence[int] | None) -> float:
    """A part of the tokens goes out and comes back, then ranks with the same tokens gather theirs."""
    longest, alike = (1, shape.size) if lens is None else (max(lens), shape.tp)
    copies = shape.moe_tp * shape.ep * (1 - (1 - 1 / shape.ep) ** shape.top_k)
    return longest * (2 * copies * _others(shape.size) / alike + _others(alike))


def _others(size: int) -> float:
    """Part of something that is not on one of so many ranks."""
    return (size - 1) / size
