"""Rows that ranks receive in a layer with experts, and the dispatch that moves fewer of them. No torch, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.spec.config import AnyParallel
from cluster.spec.ranks import moe_tp_size, num_expert_shards
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
    """Share of all experts that one token can use. Below 1 if a router first chooses groups of experts."""

    @classmethod
    def of(cls, parallel: AnyParallel, top_k: int, reach: float) -> "BlockShape":
        return cls(
            shards=num_expert_shards(parallel),
            tp=parallel.tp,
            ep=parallel.ep,
            moe_tp=moe_tp_size(parallel),
            top_k=top_k,
            reach=reach,
        )

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
    """Parts of all-reduces over shards."""
    tp_reduced: float
    """Parts of all-reduces over TP ranks."""


class ExpertTraffic(NamedTuple):
    """Exchange of one step's tokens in a layer with experts."""

    dispatch: MoeDispatch
    num_bytes: float
    """Bytes that the busiest rank receives, besides ``tp_bytes``."""
    tp_bytes: float
    """Bytes that it receives in all-reduces over TP ranks."""
    num_collectives: int
    """Number of collectives, besides those all-reduces. They run one after another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertExchange:
    """Exchange of tokens between the ranks that hold a model's experts."""

    block: BlockShape
    dp: int
    """DP ranks of the replica."""
    dispatch: MoeDispatch
    waits_for_counts: bool
    """True if the host waits for a device before an all-to-all."""
    row_bytes: int
    """Bytes of a token's hidden state."""
    sum_bytes: int
    """Bytes of a token's hidden state in an all-reduce."""

    def tokens_per_shard(self, lens: Sequence[int]) -> float:
        """Return the number of tokens per shard that the busiest block of ranks computes.

        ``lens`` are the token counts of all shards of the replica, or one count if all have the same tokens.
        """
        size = self.block.shards
        return max(sum(lens[first : first + size]) for first in range(0, len(lens), size)) / size

    def traffic(self, lens: Sequence[int]) -> ExpertTraffic:
        """Return the traffic of the first block of ranks. See ``tokens_per_shard`` for ``lens``."""
        block, own = self.block, None if len(lens) == 1 else lens[: self.block.shards]
        num_tokens, dispatch = sum(own or lens), self.dispatch
        if dispatch is MoeDispatch.AUTO:
            dispatch = choose_dispatch(block, own, num_tokens, waits_for_counts=self.waits_for_counts)
        if dispatch is MoeDispatch.GATHER:
            rows, num_collectives = gathered_rows(block.shards, block.tp, own), _collectives_of_gather(block, own)
        else:
            rows, num_collectives = sent_rows(block, own), _collectives_of_all_to_all(block, own)
        factor = num_tokens if own is None else 1
        routed_bytes = self.row_bytes + block.top_k * CHOICE_BYTES
        tp_bytes = factor * rows.tp_reduced * self.sum_bytes
        num_bytes = rows.routed * routed_bytes + rows.returned * self.row_bytes + rows.reduced * self.sum_bytes
        return ExpertTraffic(dispatch, factor * num_bytes, tp_bytes, num_collectives)


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
        return ReceivedRows(0.0, 0.0, 2 * _others(shards), 2 * _others(tp))
    longest = max(lens)
    return ReceivedRows(sum(lens) - longest, (shards - 1) * longest, 0.0, 2 * _others(tp) * longest)


def sent_rows(shape: BlockShape, lens: Sequence[int] | None) -> ReceivedRows:
    """Count the rows of an all-to-all in both directions, and of the gather after it.

    If ``lens`` is None, the counts are per token.
    """
    longest, alike = (1, shape.size) if lens is None else (max(lens), shape.tp)
    reached = max(1.0, shape.ep * shape.reach)
    copies = shape.moe_tp * reached * (1 - (1 - 1 / reached) ** shape.top_k)
    one_way = longest * copies * _others(shape.size) / alike
    return ReceivedRows(one_way, one_way + longest * _others(alike), 0.0, 0.0)


def _collectives_of_gather(block: BlockShape, lens: Sequence[int] | None) -> int:
    """Return the number of collectives that gather tokens and sum over shards, without those over TP ranks."""
    others = block.shards - 1
    if lens is None:
        return min(1, others)
    return others + (min(1, others) if len(set(lens)) == 1 else others)


def _collectives_of_all_to_all(block: BlockShape, lens: Sequence[int] | None) -> int:
    """Return the number of collectives that send counts, tokens and answers, and gather answers to equal tokens."""
    if block.size == 1:
        return 0
    has_equal_tokens = lens is None or block.tp > 1
    return 1 + 2 * (block.size - 1) + has_equal_tokens


def _others(size: int) -> float:
    return (size - 1) / size
