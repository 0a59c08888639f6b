"""Exchange of tokens between attention shards that share one feed-forward block."""

from collections.abc import Sequence

from torch import Tensor

from workers.parallel.collectives import Communicator
from workers.parallel.exchanges import gather_exact, reduce_scatter_exact

Lens = tuple[int, ...] | None
"""Tokens of every attention shard of the stage in one step, by dp * cp_size + cp; None if all have the same ones."""


class TokenExchange:
    """Gather of tokens over attention shards; a shard is the TP ranks of one (dp, cp), which have the same tokens."""

    def __init__(self, group: Communicator, shards: Sequence[int], tp: Communicator) -> None:
        """Join the shards; ``group`` is the ranks of this tp_rank, one for each of ``shards`` (numbers in Lens);
        ``tp`` is its shard.
        """
        assert group.size == len(shards), f"{group.size} ranks for the shards {shards}"
        self.group, self.tp, self._shards = group, tp, tuple(shards)

    def gather(self, rows: Tensor, lens: Lens) -> Tensor:
        """Gather the rows of all shards, one after another: one collective for equal lengths, no padding for others."""
        if lens is None or self.group.size == 1:
            return rows
        own = [lens[shard] for shard in self._shards]
        if len(set(own)) > 1:
            return gather_exact(self.group, rows, own)
        out = rows.new_empty((sum(own), *rows.shape[1:]))
        self.group.all_gather(out, rows)
        return out

    def scatter_sums(self, terms: Tensor, lens: Lens) -> Tensor:
        """Add up ``terms [all tokens, hidden]`` of every rank; return the rows of this rank's shard."""
        if lens is None:
            terms = self.group.all_reduce(terms)
        elif self.group.size > 1:
            terms = reduce_scatter_exact(self.group, terms, [lens[shard] for shard in self._shards])
        return self.tp.all_reduce(terms)
