"""Dispatch of tokens to their experts and combination of the outputs, by gather or all-to-all."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cluster.spec.strategy import MoeDispatch
from workers.device import device_of
from workers.expert_parallel.dispatch_cost import BlockShape, choose_dispatch
from workers.parallel.communicator import Communicator
from workers.parallel.exchanges import Lens, TokenExchange, all_to_all, exchange_counts, gather_rows
from workers.parallel.model_groups import ModelGroups

NO_EXPERT = -1
"""Padding for tokens that have fewer experts than other tokens."""


class RoutedTokens(NamedTuple):
    """Tokens, possibly none, with k experts each."""

    hidden: Tensor
    """``[tokens, hidden]``."""
    experts: Tensor
    """``[tokens, k]`` int32: expert numbers, or NO_EXPERT."""
    weights: Tensor
    """``[tokens, k]`` fp32."""

    def packed(self) -> Tensor:
        """Return one row of bytes per token, so that one collective moves all fields."""
        fields = zip(self, self._widths, strict=True)
        # Flattened first, since a column without rows may have a stride with which torch does not view it as bytes.
        return torch.cat([part.flatten().view(torch.uint8).view(len(part), width) for part, width in fields], dim=1)

    def unpack(self, rows: Tensor) -> "RoutedTokens":
        """Unpack tokens from other ranks. Their shape and dtypes must match this object's."""
        hidden, experts, weights = (
            columns.contiguous().view(part.dtype)
            for columns, part in zip(torch.split(rows, self._widths, dim=1), self, strict=True)
        )
        return RoutedTokens(hidden, experts, weights)

    @property
    def _widths(self) -> list[int]:
        """Bytes of each field in a row."""
        return [part.shape[1] * part.element_size() for part in self]


def order_by_expert(experts: Tensor, first: int, num_local: int) -> tuple[Tensor, list[int]]:
    """Sort the choices of ``num_local`` local experts, which begin at number ``first``, by expert and then by token.

    Returns their indices in the flattened ``experts [tokens, k]``, and the number of choices per expert. On a GPU, the
    host waits for the counts.
    """
    local = experts.flatten().long() - first
    local[(local < 0) | (local >= num_local)] = num_local
    counts = local.bincount(minlength=num_local + 1).tolist()[:num_local]
    return local.argsort(stable=True)[: sum(counts)], counts


Compute = Callable[[RoutedTokens], Tensor]
"""Function from tokens to the terms ``[tokens, hidden]`` that this rank's experts contribute."""


class TokenDispatcher(Protocol):
    """Runner of a layer's experts. Every rank that holds some of the experts must call it, even without tokens."""

    def run(self, tokens: RoutedTokens, lens: Lens, compute: Compute) -> Tensor:
        """Return the sum over each token's experts, ``[tokens, hidden]``. TP ranks have the same tokens and results."""


class GatherDispatcher:
    """Dispatcher that gives every rank all tokens and scatters the sums back."""

    def __init__(self, exchange: TokenExchange) -> None:
        self._exchange = exchange

    def run(self, tokens: RoutedTokens, lens: Lens, compute: Compute) -> Tensor:
        if lens is not None and self._exchange.group.size > 1:
            tokens = tokens.unpack(self._exchange.gather(tokens.packed(), lens))
        return self._exchange.scatter_sums(compute(tokens), lens)


class AllToAllDispatcher:
    """Dispatcher that sends each token once to every rank that holds any of its experts.

    If several ranks have the same tokens, each of these ranks sends a part of the tokens.
    """

    def __init__(self, block: Communicator, tp: Communicator, num_local: int, moe_tp: int) -> None:
        """Create a dispatcher. ``block`` has all ranks that together hold the experts, ``moe_tp`` ranks per EP rank."""
        self._block, self._tp, self._num_local, self._moe_tp = block, tp, num_local, moe_tp

    def run(self, tokens: RoutedTokens, lens: Lens, compute: Compute) -> Tensor:
        if self._block.size == 1:
            return compute(tokens)
        alike = self._block if lens is None else self._tp
        padded_len = -(-len(tokens.hidden) // alike.size)
        mine = slice(alike.rank * padded_len, (alike.rank + 1) * padded_len)
        own = self._compute_remotely(RoutedTokens(*(part[mine] for part in tokens)), compute)
        return gather_rows(alike, own, padded_len)[: len(tokens.hidden)]

    def _compute_remotely(self, tokens: RoutedTokens, compute: Compute) -> Tensor:
        """Send this rank's tokens to their experts and return the sums of the outputs."""
        by_rank = self._tokens_by_rank(tokens.experts)
        counts = exchange_counts(self._block, [len(wanted) for wanted in by_rank])
        terms = compute(self._receive(tokens, by_rank, counts))
        answers = all_to_all(self._block, torch.split(terms, counts), [len(wanted) for wanted in by_rank])
        total = torch.zeros(tokens.hidden.shape, dtype=torch.float32, device=terms.device)
        for wanted, answer in zip(by_rank, answers, strict=True):
            total.index_add_(0, wanted, answer.float())
        return total.to(terms.dtype)

    def _receive(self, tokens: RoutedTokens, by_rank: Sequence[Tensor], counts: Sequence[int]) -> RoutedTokens:
        """Send this rank's tokens, and return those for this rank's experts."""
        packed = tokens.packed()
        parts = all_to_all(self._block, [packed.index_select(0, wanted) for wanted in by_rank], counts)
        received = torch.cat(parts)
        del packed, parts
        return tokens.unpack(received)

    def _tokens_by_rank(self, experts: Tensor) -> list[Tensor]:
        ep_ranks, num_ep = experts // self._num_local, self._block.size // self._moe_tp
        wanted = [(ep_ranks == ep_rank).any(dim=1).nonzero()[:, 0] for ep_rank in range(num_ep)]
        return [wanted[rank // self._moe_tp] for rank in range(self._block.size)]


class AutoDispatcher:
    """Dispatcher that uses the dispatch estimated to be cheaper in each step. All ranks choose the same one."""

    def __init__(self, ways: Mapping[MoeDispatch, TokenDispatcher], shape: BlockShape, shards: range) -> None:
        self._ways, self._shape, self._shards = ways, shape, shards

    def run(self, tokens: RoutedTokens, lens: Lens, compute: Compute) -> Tensor:
        own = None if lens is None else [lens[shard] for shard in self._shards]
        num_tokens = len(tokens.hidden) if own is None else sum(own)
        waits = device_of(tokens.hidden).has_kernels
        dispatch = choose_dispatch(self._shape, own, num_tokens, waits_for_counts=waits)
        return self._ways[dispatch].run(tokens, lens, compute)


def make_dispatcher(groups: ModelGroups, top_k: int, num_local: int, reach: float) -> TokenDispatcher:
    """Return the configured dispatcher. See ``BlockShape`` for ``reach``."""
    moe_tp = groups.expert_width.size
    exchange = TokenExchange(groups.moe_shards, groups.expert_shards, groups.tp)
    ways: dict[MoeDispatch, TokenDispatcher] = {
        MoeDispatch.GATHER: GatherDispatcher(exchange),
        MoeDispatch.ALL_TO_ALL: AllToAllDispatcher(groups.moe_block, groups.tp, num_local, moe_tp),
    }
    if groups.moe_dispatch is not MoeDispatch.AUTO:
        return ways[groups.moe_dispatch]
    return AutoDispatcher(ways, BlockShape.of(groups.parallel, top_k, reach), groups.expert_shards)
