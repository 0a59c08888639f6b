"""Token embedding and output scores, each rank with its part of the vocabulary."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.layers.matmul import multiply, packed
from workers.layers.shard import ShardedLayer, TpGroup, WeightShard, even_shard, replicated


class Embedding(ShardedLayer):
    """Table [vocab_size, hidden_size], read by token id, or multiplied with to score every token."""

    def __init__(self, vocab_size: int, hidden_size: int, group: TpGroup) -> None:
        super().__init__()
        self._tokens, self._group = even_shard(vocab_size, group), group
        self.weight = nn.Parameter(torch.empty(self._tokens.size, hidden_size), requires_grad=False)
        self._packed: Tensor | None = None
        """The table for ``scores``, where it is read by token id too."""

    def forward(self, token_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return functional.embedding(token_ids, self.weight)
        rows = token_ids - self._tokens.start
        is_elsewhere = (rows < 0) | (rows >= self._tokens.size)
        found = functional.embedding(rows.masked_fill(is_elsewhere, 0), self.weight)
        return self._group.all_reduce(found.masked_fill_(is_elsewhere[:, None], 0))

    def scores(self, hidden: Tensor) -> Tensor:
        """Map hidden [R, hidden_size], the same on all ranks, to [R, vocab_size], in the dtype of the table."""
        own = multiply(hidden, self.weight if self._packed is None else self._packed)
        if self._group.size == 1:
            return own
        size, num_tokens = self._group.size, self._tokens.size
        parts = own.new_empty(size * len(own), num_tokens)
        self._group.all_gather(parts, own)
        by_row = parts.view(size, len(own), num_tokens).transpose(0, 1).reshape(len(own), size * num_tokens)
        return by_row[:, : self._tokens.whole].contiguous()

    def pack(self, *, is_read: bool) -> None:
        """Pack the table for ``scores``, once it is filled; a table that is also read by token id stays as it is."""
        if is_read:
            self._packed = packed(self.weight)
        else:
            self.weight = nn.Parameter(packed(self.weight), requires_grad=False)

    def weights(self) -> Iterator[tuple[str, WeightShard]]:
        yield "weight", WeightShard(self.weight, (self._tokens, replicated(self.weight.shape[1])))
