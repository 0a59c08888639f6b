"""Attention shards whose tokens meet in one feed-forward block, of which every rank computes a part."""

from collections.abc import Sequence

from torch import Tensor

from workers.parallel.collectives import Communicator
from workers.parallel.exchanges import gather_exact, reduce_scatter_exact

Lens = tuple[int, ...] | None
"""Tokens of every attention shard of the stage in one step, by dp * cp_size + cp; None where all have the same ones."""


class TokenSharing:
    """An attention shard is the TP ranks of one (dp, cp): they have the same tokens, and different parts of a block."""

    def __init__(self, group: Communicator, shards: Sequence[int], tp: Communicator) -> None:
        """``group``: the ranks of this tp_rank, one for each of ``shards`` (numbered as in Lens); ``tp``: its shard."""
        assert group.size == len(shards), f"{group.size} ranks for the shards {shards}"
        self.group, self.tp, self._shards = group, tp, tuple(shards)

    def gather(self, rows: Tensor, lens: Lens) -> Tensor:
        """The rows of all shards, one after another. Lengths that are equal take one collective, others no padding."""
        if lens is None or self.group.size == 1:
            return rows
        own = [lens[shard] for shard in self._shards]
        if len(set(own)) > 1:
            return gather_exact(self.group, rows, own)
        out = rows.new_empty((sum(own), *rows.shape[1:]))
        self.group.all_gather(out, rows)
        return out

    def sum_home(self, terms: Tensor, lens: Lens) -> Tensor:
        """``terms [all tokens, hidden]`` of every rank, added up; returns the rows of this rank's shard."""
        if lens is None:
            terms = self.group.all_reduce(terms)
        elif self.group.size > 1:
            terms = reduce_scatter_exact(self.group, terms, [lens[shard] for shard in self._shards])
        return self.tp.all_reduce(terms)
