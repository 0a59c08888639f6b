"""Brings tokens to their experts and the answers home. Two ways behind one interface, and which one moves less."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from cluster.spec.strategy import MoeDispatch
from workers.expert_parallel.choice import BlockShape, fewer_rows
from workers.expert_parallel.routed import Routed
from workers.expert_parallel.sharing import Lens, TokenSharing
from workers.kernel_devices import has_kernels
from workers.parallel.collectives import Communicator
from workers.parallel.exchanges import all_to_all, exchange_counts
from workers.parallel.model_groups import ModelGroups

FEW_TOKENS = 4096
"""Up to so many of all shards are gathered on GPUs, where the host would wait for counts; not measured."""
Compute = Callable[[Routed], Tensor]
"""The terms ``[tokens, hidden]`` that the experts of this rank add for some tokens."""


class Dispatcher(Protocol):
    """Called in every MoE layer by every rank that holds a part of the experts, also by one without a token."""

    def run(self, routed: Routed, lens: Lens, compute: Compute) -> Tensor:
        """The sum over all chosen experts, ``[tokens, hidden]``, for this rank's tokens; the same on its TP ranks."""


class GatherDispatcher:
    """Every rank gets all tokens, and answers for those experts that it holds; sums go home."""

    def __init__(self, sharing: TokenSharing) -> None:
        self._sharing = sharing

    def run(self, routed: Routed, lens: Lens, compute: Compute) -> Tensor:
        """See Dispatcher."""
        if lens is not None and self._sharing.group.size > 1:
            routed = routed.unpack(self._sharing.gather(routed.packed(), lens))
        return self._sharing.sum_home(compute(routed), lens)


class AllToAllDispatcher:
    """Each token goes to the ranks that hold its experts, once to each. Ranks with the same tokens send a part each."""

    def __init__(self, block: Communicator, tp: Communicator, num_local: int, moe_tp: int) -> None:
        """``block``: all ranks that share the experts; EP rank e's are e * moe_tp and the moe_tp - 1 after it."""
        self._block, self._tp, self._num_local, self._moe_tp = block, tp, num_local, moe_tp

    def run(self, routed: Routed, lens: Lens, compute: Compute) -> Tensor:
        """See Dispatcher."""
        if self._block.size == 1:
            return compute(routed)
        alike = self._block if lens is None else self._tp
        padded_len = -(-len(routed.hidden) // alike.size)
        mine = slice(alike.rank * padded_len, (alike.rank + 1) * padded_len)
        own = self._answers(Routed(*(part[mine] for part in routed)), compute)
        send = own.new_zeros(padded_len, own.shape[1])
        send[: len(own)] = own
        out = own.new_empty(alike.size * padded_len, own.shape[1])
        alike.all_gather(out, send)
        return out[: len(routed.hidden)]

    def _answers(self, routed: Routed, compute: Compute) -> Tensor:
        """Of tokens that no other rank asks for."""
        homes = self._homes(routed.experts)
        rows = routed.packed()
        counts = exchange_counts(self._block, [len(home) for home in homes])
        received = all_to_all(self._block, [rows[home] for home in homes], counts)
        terms = compute(routed.unpack(torch.cat(received)))
        answers = all_to_all(self._block, torch.split(terms, counts), [len(home) for home in homes])
        total = torch.zeros(routed.hidden.shape, dtype=torch.float32, device=terms.device)
        for home, answer in zip(homes, answers, strict=True):
            total.index_add_(0, home, answer.float())
        return total.to(terms.dtype)

    def _homes(self, experts: Tensor) -> list[Tensor]:
        """By rank of the block: the tokens that it must see."""
        ep_ranks = experts // self._num_local
        wanted = [(ep_ranks == ep_rank).any(dim=1).nonzero()[:, 0] for ep_rank in range(self._num_ep)]
        return [wanted[rank // self._moe_tp] for rank in range(self._block.size)]

    @property
    def _num_ep(self) -> int:
        return self._block.size // self._moe_tp


class CheaperDispatcher:
    """Of the two ways the one that is expected to move less, step by step; the same on every rank."""

    def __init__(self, ways: Mapping[MoeDispatch, Dispatcher], shape: BlockShape, shards: range) -> None:
        self._ways, self._shape, self._shards = ways, shape, shards

    def run(self, routed: Routed, lens: Lens, compute: Compute) -> Tensor:
        """See Dispatcher."""
        own = None if lens is None else [lens[shard] for shard in self._shards]
        num_tokens = len(routed.hidden) if own is None else sum(own)
        if has_kernels(routed.hidden) and num_tokens <= FEW_TOKENS:
            return self._ways[MoeDispatch.GATHER].run(routed, lens, compute)
        return self._ways[fewer_rows(self._shape, own)].run(routed, lens, compute)


def make_dispatcher(groups: ModelGroups, num_chosen: int, num_local: int) -> Dispatcher:
    """The one that the configuration asks for."""
    moe_tp = groups.expert_width.size
    sharing = TokenSharing(groups.moe_shards, groups.expert_shards, groups.tp)
    ways: dict[MoeDispatch, Dispatcher] = {
        MoeDispatch.GATHER: GatherDispatcher(sharing),
        MoeDispatch.ALL_TO_ALL: AllToAllDispatcher(groups.moe_block, groups.tp, num_local, moe_tp),
    }
    if groups.moe_dispatch is not MoeDispatch.AUTO:
        return ways[groups.moe_dispatch]
    shape = BlockShape(
        shards=groups.moe_shards.size, tp=groups.tp.size, ep=groups.parallel.ep, moe_tp=moe_tp, top_k=num_chosen
    )
    return CheaperDispatcher(ways, shape, groups.expert_shards)
