"""Attention part of a decoder layer: projections, and attention through the engine's context."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from workers.attention.interface import AttentionParams, AttentionShape
from workers.attention.selection import IndexQueries
from workers.kernels.elementwise import KvSlots
from workers.layers.attention_config import AttentionConfig
from workers.layers.linear import RMSNorm
from workers.layers.projections import Projections
from workers.layers.rotary import Rotation
from workers.layers.shard import even_shard, kv_head_shard
from workers.parallel.communicator import Communicator
from workers.parallel.exchanges import Lens


class AttentionWork(NamedTuple):
    """Size of a step's attention on one rank, from which a layer can choose how to compute it."""

    num_queries: int = 0
    num_keys: int = 0
    """Number of keys of the requests that have queries."""
    num_pairs: int = 0
    """Number of (query, key) pairs."""


Expand = Callable[..., tuple[Tensor, Tensor]]
"""Function from the parts of some rows as stored, ``[rows, kv_heads, dim]`` each, to keys ``[rows, heads, D]`` and
values ``[rows, heads, V]``.
"""


class AttentionContext(Protocol):
    """Keys and values of one step, held by the engine.

    A layer calls `put` and then `attend`, once each, even without tokens. Layers make these calls in layer order. If
    `kv_slots` returns slots, the layer fills them instead of calling `put`. Tokens are this rank's tokens, concatenated
    over requests as in the model's `token_ids`.
    """

    lens: Lens = None
    """Number of tokens per attention shard in this step. None if all shards have the same tokens."""
    last_layer_lens: Lens = None
    """Number of tokens per attention shard that have queries in the last layer."""
    counted: Tensor | None = None
    """Mask of tokens that are not padding, bool ``[num_tokens, 1]``. None without padding. Padding uses no experts."""
    query_rows: Tensor | None = None
    """Rows of the tokens that have queries, int64. None if all have queries."""

    kv_first: bool = False
    """True to project queries after `put`, because keys and values are in transit or few tokens have queries."""

    @property
    def work(self) -> AttentionWork:
        """Return the size of this step's attention. Zero if keys must be used as stored."""
        return AttentionWork()

    @property
    def most_keys(self) -> int:
        """Return the maximum number of keys that a query of this step sees, on any rank. Zero if keys are never
        selected.
        """
        return 0

    @property
    def last_layer(self) -> "AttentionContext":
        """Return the context of the last layer, where only tokens whose final hidden states are needed have queries."""
        return self

    def kv_slots(self, layer: int) -> KvSlots | None:  # noqa: ARG002
        """Return the slots in which a kernel stores the layer's new keys and values. None if the layer must call `put`,
        as it must with `kv_first`.
        """
        return None

    def put(self, layer: int, *parts: Tensor) -> None:
        """Store or send the parts of a layer's new KV, each [num_tokens, num_kv_heads, dim], such as rotated K, and V.

        They may be stored later, so the caller must not change them.
        """

    def attend(self, layer: int, q: Tensor, params: AttentionParams, expand: Expand | None = None) -> Tensor:
        """Return causal attention [num_queries, num_heads, value_dim] over all visible tokens, in q's dtype.

        q [num_queries, num_heads, head_dim] is rotated but not scaled. With ``expand``, the queries meet the keys and
        values that it returns, a tile of rows at a time.
        """

    def attend_selected(
        self,
        layer: int,  # noqa: ARG002
        q: Tensor,  # noqa: ARG002
        params: AttentionParams,  # noqa: ARG002
        index: IndexQueries | None,  # noqa: ARG002
        top_k: int,  # noqa: ARG002
    ) -> Tensor:
        """Return attention like `attend`, over the ``top_k`` visible keys that score highest for each query.

        A layer calls this instead of `attend`. The last part that it has put contains the keys of its indexer, and
        ``index`` are its queries. Of keys with equal scores, earlier ones are used. If ``index`` is None, the layer has
        no indexer, and the queries use the keys selected in the nearest layer before it that has one.
        """
        raise AssertionError("layers select keys only if the context says how many a query sees")


def take(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


class Attention(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        config: AttentionConfig,
        rms_norm_eps: float,
        layer: int,
        group: Communicator,
        projections: Projections,
        window: int | None = None,
    ) -> None:
        """Build the layer. ``layer`` is its index in the pipeline stage."""
        super().__init__()
        self.layer, self.head_dim, self._group = layer, config.head_dim, group
        q = even_shard(config.q_size, group)
        kv = kv_head_shard(config.num_kv_heads, config.head_dim, group)
        self.q_size = q.size
        self.shape = AttentionShape(
            num_heads=q.size // config.head_dim,
            num_kv_heads=kv.size // config.head_dim,
            query_dim=config.head_dim,
            value_dim=config.head_dim,
            params=AttentionParams(config.head_dim**-0.5, window),
        )
        self.qkv = projections.queries(layer, hidden_size, {"q": q, "k": kv, "v": kv}, bias=config.qkv_bias)
        self.out = projections.output(layer, q, hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        attended = context.attend(self.layer, self._queries(x, rotation, context), self.shape.params)
        out: Tensor = self.out(attended.flatten(1), self._group.all_reduce)
        return out

    def _queries(self, x: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """Put keys and values into the context and return the rotated queries."""
        if context.kv_first:
            self._put(self.qkv.project(x, slice(self.q_size, None)), rotation, context)
            q = self.qkv.project(take(x, context.query_rows), slice(self.q_size))
            rotation = rotation.take(context.query_rows)
        else:
            qkv = self.qkv(x)
            if (kv_slots := context.kv_slots(self.layer)) is not None:
                return rotation.apply_storing(self._split_heads(qkv), self.q_norm, self.k_norm, kv_slots)
            q, kv = qkv.tensor_split((self.q_size,), dim=-1)
            self._put(kv, rotation, context)
        return rotation.apply(self._split_heads(q), self.q_norm)

    def _put(self, kv: Tensor, rotation: Rotation, context: AttentionContext) -> None:
        k, v = self._split_heads(kv).chunk(2, dim=1)
        context.put(self.layer, rotation.apply(k, self.k_norm), v)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), x.shape[1] // self.head_dim, self.head_dim)
