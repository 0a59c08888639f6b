"""Rows that ranks receive in a layer with experts, and the dispatch that moves fewer of them. No torch, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.spec.strategy import MoeDispatch

FEW_TOKENS = 4096
"""Maximum number of tokens, over all shards, for which GPUs use gather, because all-to-all waits for counts. This
threshold is a guess.
"""
CHOICE_BYTES = 8
"""Bytes of a token's routing to one expert: its number and its weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Numbers of ranks that together hold one copy of the experts: shards * tp, or equivalently ep * moe_tp."""

    shards: int
    tp: int
    ep: int
    moe_tp: int
    top_k: int
    """Experts per token."""
    reach: float = 1.0
    """Share of all experts among which one token's are. Below 1 if a router first chooses groups of experts."""

    @property
    def size(self) -> int:
        return self.shards * self.tp


class ReceivedRows(NamedTuple):
    """Numbers of hidden states that the busiest rank receives in a layer. All-to-all assumes random routing."""

    routed: float
    """Tokens on their way to experts."""
    returned: float
    """Answers, or terms of sums, on their way back."""
    reduced: float
    """Parts of all-reduces."""


def choose_dispatch(
    shape: BlockShape, lens: Sequence[int] | None, num_tokens: int, *, waits_for_counts: bool
) -> MoeDispatch:
    """Return the dispatch for ``num_tokens`` tokens of all shards.

    ``lens`` are the token counts of the shards, or None if all shards have the same tokens. ``waits_for_counts`` says
    whether the host waits for a device before an all-to-all.
    """
    if waits_for_counts and num_tokens <= FEW_TOKENS:
        return MoeDispatch.GATHER
    return cheaper_dispatch(shape, lens)


def cheaper_dispatch(shape: BlockShape, lens: Sequence[int] | None) -> MoeDispatch:
    """Return the dispatch with which the busiest rank receives fewer hidden states. See ``choose_dispatch``."""
    is_gather = sum(gathered_rows(shape.shards, shape.tp, lens)) <= sum(sent_rows(shape, lens))
    return MoeDispatch.GATHER if is_gather else MoeDispatch.ALL_TO_ALL


def gathered_rows(shards: int, tp: int, lens: Sequence[int] | None) -> ReceivedRows:
    """Count the rows of a gather of all shards' tokens, and of the sums over shards and TP ranks.

    If ``lens`` is None, the counts are per token.
    """
    if lens is None:
        return ReceivedRows(0.0, 0.0, 2 * _others(shards) + 2 * _others(tp))
    longest = max(lens)
    return ReceivedRows(sum(lens) - longest, (shards - 1) * longest, 2 * _others(tp) * longest)


def sent_rows(shape: BlockShape, lens: Sequence[int] | None) -> ReceivedRows:
    """Count the rows of an all-to-all in both directions, and of the gather after it.

    If ``lens`` is None, the counts are per token.
    """
    longest, alike = (1, shape.size) if lens is None else (max(lens), shape.tp)
    reached = max(1.0, shape.ep * shape.reach)
    copies = shape.moe_tp * reached * (1 - (1 - 1 / reached) ** shape.top_k)
    one_way = longest * copies * _others(shape.size) / alike
    return ReceivedRows(one_way, one_way + longest * _others(alike), 0.0)


def _others(size: int) -> float:
    return (size - 1) / size
