"""Attention part of a decoder layer: projections, rotation, and attention through the engine's context."""

from typing import Protocol

from torch import Tensor, nn

from workers.attention.interface import AttentionParams, AttentionShape
from workers.expert_parallel.token_dispatcher import Lens
from workers.kernels.elementwise import KvSlots
from workers.layers.config import AttentionConfig
from workers.layers.linear import FusedLinear, SummedLinear
from workers.layers.rms_norm import RMSNorm
from workers.layers.rotary import Rotation
from workers.layers.shard import even_shard, kv_head_shard
from workers.parallel.collectives import Communicator


class AttentionContext(Protocol):
    """Keys and values of one step, held by the engine.

    A layer calls `put` and then `attend`, once each, even without tokens. Layers call in order. If `kv_slots` returns
    slots, the layer fills them instead of calling `put`. Tokens are this rank's tokens, concatenated over requests as
    in the model's `token_ids`.
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
    """True to project queries after `put`, because keys and values travel meanwhile or few tokens have queries."""

    @property
    def last_layer(self) -> "AttentionContext":
        """Return the context of the last layer, where only tokens whose final hidden states are needed have queries."""
        return self

    def kv_slots(self, layer: int) -> KvSlots | None:  # noqa: ARG002
        """Return the slots in which a kernel stores the layer's new keys and values. None if the layer must call `put`,
        as it must with `kv_first`.
        """
        return None

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store or send a layer's new keys (rotated) and values, each [num_tokens, num_kv_heads, head_dim].

        They may be stored later, so the caller must not change them.
        """

    def attend(self, layer: int, q: Tensor, params: AttentionParams) -> Tensor:
        """Return causal attention [num_queries, num_heads, value_dim] over all visible tokens, in q's dtype.

        q [num_queries, num_heads, head_dim] is rotated but not scaled.
        """


def take(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x[rows]


class Attention(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        config: AttentionConfig,
        rms_norm_eps: float,
        layer: int,
        group: Communicator,
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
            query_dim=config.head_dim,
            value_dim=config.head_dim,
            params=AttentionParams(config.head_dim**-0.5, window),
        )
        self.qkv = FusedLinear(hidden_size, {"q": q, "k": kv, "v": kv}, bias=config.qkv_bias)
        self.out = SummedLinear(q, hidden_size, bias=config.output_bias)
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
