"""Bringing the rows of all CP ranks together: K and V once a layer, hidden states at the end of a step."""

import torch
from torch import Tensor

from workers.context_parallel.shard_plan import ShardPlan
from workers.parallel.collectives import Communicator


class KvGather:
    """Gathers K and V of one layer over a CP group in one collective; owned by a worker, reused for every layer.

    Buffers grow to the largest step seen and are kept.
    """

    def __init__(self, group: Communicator) -> None:
        self.group = group
        self._send: Tensor | None = None
        self._receive: Tensor | None = None

    def gather(self, plan: ShardPlan, key: Tensor, value: Tensor) -> Tensor:
        """Gathered order of this rank's ``key`` and ``value [tokens, heads, dim]``: ``[rows, 2, heads, dim]``.

        The result is valid until the next call. Padding rows hold anything finite or not: never read them.
        """
        if plan.replicated:
            return torch.stack((key, value), dim=1)
        assert plan.cp == self.group.size, f"a plan for {plan.cp} ranks in a group of {self.group.size}"
        row_shape = (2, *key.shape[1:])
        self._send = _at_least(self._send, plan.padded_len, row_shape, key)
        self._receive = _at_least(self._receive, plan.cp * plan.padded_len, row_shape, key)
        send, receive = self._send[: plan.padded_len], self._receive[: plan.cp * plan.padded_len]
        torch.stack((key, value), dim=1, out=send[: len(key)])
        self.group.all_gather(receive, send)
        return receive


def gather_rows(group: Communicator, rows: Tensor, padded_len: int) -> Tensor:
    """Every rank's ``rows [n, ...]``, n at most ``padded_len``, as ``[size * padded_len, ...]``; padding is zero."""
    send = rows.new_zeros((padded_len, *rows.shape[1:]))
    send[: len(rows)] = rows
    out = rows.new_empty((group.size * padded_len, *rows.shape[1:]))
    group.all_gather(out, send)
    return out


def join_rows(group: Communicator, plan: ShardPlan, rows: Tensor) -> Tensor:
    """Every rank's local ``rows [tokens, ...]`` as ``[num_tokens, ...]`` in the order of the flattened batch."""
    if plan.replicated:
        return rows
    gathered = gather_rows(group, rows, plan.padded_len)
    return gathered[torch.from_numpy(plan.inverse).to(rows.device)]


def _at_least(buffer: Tensor | None, num_rows: int, row_shape: tuple[int, ...], like: Tensor) -> Tensor:
    if buffer is None or len(buffer) < num_rows or buffer.shape[1:] != row_shape or buffer.dtype != like.dtype:
        return like.new_zeros((num_rows, *row_shape))
    return buffer
