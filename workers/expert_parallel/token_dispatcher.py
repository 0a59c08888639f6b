"""Dispatch of tokens to their experts, and of the answers back: two ways behind one interface."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from cluster.spec.strategy import MoeDispatch
from workers.device import has_kernels
from workers.expert_parallel.dispatch_cost import BlockShape, cheaper_dispatch
from workers.expert_parallel.routed_tokens import RoutedTokens
from workers.expert_parallel.token_exchange import Lens, TokenExchange
from workers.parallel.collectives import Communicator
from workers.parallel.exchanges import all_to_all, exchange_counts
from workers.parallel.model_groups import ModelGroups

FEW_TOKENS = 4096
"""Most tokens of all shards that are gathered on GPUs, where all-to-all waits for counts; not measured."""
Compute = Callable[[RoutedTokens], Tensor]
"""Function from tokens to the terms ``[tokens, hidden]`` that the experts of this rank add to them."""


class TokenDispatcher(Protocol):
    """Runner of a layer's experts. Called by every rank that holds a part of them, even by one without a token."""

    def run(self, tokens: RoutedTokens, lens: Lens, compute: Compute) -> Tensor:
        """Return the sum over all chosen experts, ``[tokens, hidden]``, of this rank's tokens, on all its TP ranks."""


class GatherDispatcher:
    """Dispatcher that gives every rank all tokens and scatters the sums back."""

    def __init__(self, exchange: TokenExchange) -> None:
        self._exchange = exchange

    def run(self, tokens: RoutedTokens, lens: Lens, compute: Compute) -> Tensor:
        if lens is not None and self._exchange.group.size > 1:
            tokens = tokens.unpack(self._exchange.gather(tokens.packed(), lens))
        return self._exchange.scatter_sums(compute(tokens), lens)


class AllToAllDispatcher:
    """Dispatcher that sends each token once to every rank with experts of it. Ranks with the same tokens send a part
    each.
    """

    def __init__(self, block: Communicator, tp: Communicator, num_local: int, moe_tp: int) -> None:
        """Build the dispatcher; ``block`` is all ranks that share the experts, moe_tp of them from e * moe_tp on for
        EP rank e.
        """
        self._block, self._tp, self._num_local, self._moe_tp = block, tp, num_local, moe_tp

    def run(self, tokens: RoutedTokens, lens: Lens, compute: Compute) -> Tensor:
        if self._block.size == 1:
            return compute(tokens)
        alike = self._block if lens is None else self._tp
        padded_len = -(-len(tokens.hidden) // alike.size)
        mine = slice(alike.rank * padded_len, (alike.rank + 1) * padded_len)
        own = self._answers(RoutedTokens(*(part[mine] for part in tokens)), compute)
        send = own.new_zeros(padded_len, own.shape[1])
        send[: len(own)] = own
        out = own.new_empty(alike.size * padded_len, own.shape[1])
        alike.all_gather(out, send)
        return out[: len(tokens.hidden)]

    def _answers(self, tokens: RoutedTokens, compute: Compute) -> Tensor:
        """Compute tokens that no other rank sends."""
        by_rank = self._tokens_by_rank(tokens.experts)
        rows = tokens.packed()
        counts = exchange_counts(self._block, [len(wanted) for wanted in by_rank])
        received = all_to_all(self._block, [rows[wanted] for wanted in by_rank], counts)
        terms = compute(tokens.unpack(torch.cat(received)))
        answers = all_to_all(self._block, torch.split(terms, counts), [len(wanted) for wanted in by_rank])
        total = torch.zeros(tokens.hidden.shape, dtype=torch.float32, device=terms.device)
        for wanted, answer in zip(by_rank, answers, strict=True):
            total.index_add_(0, wanted, answer.float())
        return total.to(terms.dtype)

    def _tokens_by_rank(self, experts: Tensor) -> list[Tensor]:
        """Return the tokens that each rank of the block must see."""
        ep_ranks = experts // self._num_local
        wanted = [(ep_ranks == ep_rank).any(dim=1).nonzero()[:, 0] for ep_rank in range(self._num_ep)]
        return [wanted[rank // self._moe_tp] for rank in range(self._block.size)]

    @property
    def _num_ep(self) -> int:
        return self._block.size // self._moe_tp


class AutoDispatcher:
    """Dispatcher that takes the way expected to move less in each step; the same on every rank."""

    def __init__(self, ways: Mapping[MoeDispatch, TokenDispatcher], shape: BlockShape, shards: range) -> None:
        self._ways, self._shape, self._shards = ways, shape, shards

    def run(self, tokens: RoutedTokens, lens: Lens, compute: Compute) -> Tensor:
        own = None if lens is None else [lens[shard] for shard in self._shards]
        num_tokens = len(tokens.hidden) if own is None else sum(own)
        if has_kernels(tokens.hidden) and num_tokens <= FEW_TOKENS:
            return self._ways[MoeDispatch.GATHER].run(tokens, lens, compute)
        return self._ways[cheaper_dispatch(self._shape, own)].run(tokens, lens, compute)


def make_dispatcher(groups: ModelGroups, top_k: int, num_local: int) -> TokenDispatcher:
    """Return the dispatcher that the configuration asks for."""
    moe_tp = groups.expert_width.size
    exchange = TokenExchange(groups.moe_shards, groups.expert_shards, groups.tp)
    ways: dict[MoeDispatch, TokenDispatcher] = {
        MoeDispatch.GATHER: GatherDispatcher(exchange),
        MoeDispatch.ALL_TO_ALL: AllToAllDispatcher(groups.moe_block, groups.tp, num_local, moe_tp),
    }
    if groups.moe_dispatch is not MoeDispatch.AUTO:
        return ways[groups.moe_dispatch]
    shape = BlockShape(
        shards=groups.moe_shards.size, tp=groups.tp.size, ep=groups.parallel.ep, moe_tp=moe_tp, top_k=top_k
    )
    return AutoDispatcher(ways, shape, groups.expert_shards)
