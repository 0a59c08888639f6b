"""Indexer of DeepSeek Sparse Attention, which scores keys for a query. See ``IndexerConfig``."""

from torch import Tensor, nn

from workers.attention.selection import IndexQueries
from workers.layers.attention_config import IndexerConfig, LatentAttentionConfig
from workers.layers.linear import LayerNorm, ReplicatedLinear
from workers.layers.rotary import Rotation, in_pairs

_EPS = 1e-6
"""Epsilon of the norm of keys."""


class Indexer(nn.Module):
    """Indexer of one layer. Every TP rank computes all of it, and so all choose the same keys."""

    def __init__(self, hidden_size: int, config: IndexerConfig, attention: LatentAttentionConfig) -> None:
        super().__init__()
        assert attention.query_rank is not None, "an indexer reads queries of low rank"
        self._config, self._rope_dim = config, attention.rope_dim
        self.wq_b = ReplicatedLinear(attention.query_rank, config.query_size)
        self.wk = ReplicatedLinear(hidden_size, config.head_dim)
        self.k_norm = LayerNorm(config.head_dim, _EPS)
        self.weights_proj = ReplicatedLinear(hidden_size, config.num_heads, is_wide=True)
        self._factor = config.num_heads**-0.5 * config.head_dim**-0.5

    def keys(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Return the keys of hidden states ``x [n, hidden]``, ``[n, 1, head_dim]``."""
        return self._rotated(self.k_norm(self.wk(x))[:, None], rotation)

    def queries(self, x: Tensor, low_rank: Tensor, rotation: Rotation) -> IndexQueries:
        """Return the queries of hidden states ``x [n, hidden]``. ``low_rank [n, query_rank]`` is their normalized
        projection, from which the queries of attention follow, too.
        """
        weights = self.weights_proj(x) * self._factor
        heads = self.wq_b(low_rank).view(len(x), self._config.num_heads, self._config.head_dim)
        return IndexQueries(self._rotated(heads, rotation), weights)

    def _rotated(self, heads: Tensor, rotation: Rotation) -> Tensor:
        """Rotate the first part of ``heads [n, heads, head_dim]`` in place, and return all of it."""
        turned = heads[..., : self._rope_dim]
        turned.copy_(rotation.apply(in_pairs(turned) if self._config.is_interleaved else turned))
        return heads
