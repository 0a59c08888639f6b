"""Attention half of a decoder layer: project, rotate, attend through the engine's context, project back."""

from typing import Protocol

from torch import Tensor, nn

from workers.attention.interface import AttentionParams
from workers.expert_parallel.token_dispatcher import Lens
from workers.kernels.elementwise import KvSlots
from workers.layers.config import AttentionConfig
from workers.layers.linear import FusedLinear, SummedLinear
from workers.layers.rms_norm import RMSNorm
from workers.layers.rotary import Rotation
from workers.layers.shard import TpGroup, even_shard, kv_head_shard


class AttentionContext(Protocol):
    """Key-value side of one step, made by the engine.

    A layer calls `put` and then `attend`, once each, layers in order; if `kv_slots` returns some, it fills them instead
    of calling `put`. Tokens are this rank's, flattened over requests in the order of the model's `token_ids`; the
    calls are made even when there are none.
    """

    lens: Lens
    """Token counts of every attention shard in this step."""
    last_lens: Lens
    """Counts of the tokens that have queries in the last layer."""
    counted: Tensor | None
    """Mask of tokens that belong to a request, bool ``[num_tokens, 1]``; None for all. Padding uses no experts."""
    wanted: Tensor | None
    """Rows of the tokens that have queries, int64; None for all."""

    kv_first: bool
    """Whether to project queries after `put`: keys and values travel to other ranks meanwhile, or fewer tokens have
    queries.
    """

    @property
    def last(self) -> "AttentionContext":
        """Context of the last layer, where only tokens whose final hidden states are wanted have queries."""

    def kv_slots(self, layer: int) -> KvSlots | None:
        """Return the slots where a kernel stores a layer's new keys and values; None if `put` takes them, as with
        `kv_first`.
        """

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Hand over a layer's new keys (rotated) and values, each [num_tokens, num_kv_heads, head_dim].

        May return before they are stored; the tensors must not be changed afterwards.
        """

    def attend(self, layer: int, q: Tensor, params: AttentionParams) -> Tensor:
        """Return causal attention of q [num_wanted, num_heads, head_dim] (rotated, not scaled) over all visible
        tokens.

        Returns [num_wanted, num_heads, value_dim] in the dtype of q.
        """


def take(x: Tensor, wanted: Tensor | None) -> Tensor:
    return x if wanted is None else x[wanted]


class Attention(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        config: AttentionConfig,
        rms_norm_eps: float,
        layer: int,
        group: TpGroup,
        window: int | None = None,
    ) -> None:
        """Build the layer; ``layer`` counts from the stage's first one."""
        super().__init__()
        self.layer, self.head_dim, self._group = layer, config.head_dim, group
        q = even_shard(config.q_size, group)
        kv = kv_head_shard(config.num_kv_heads, config.head_dim, group)
        self.q_size = q.size
        self._params = AttentionParams(config.head_dim**-0.5, window)
        self.qkv_proj = FusedLinear(hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv}, bias=config.qkv_bias)
        self.o_proj = SummedLinear(q, hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """Map x [num_tokens, hidden_size] to [num_wanted, hidden_size]."""
        attended = context.attend(self.layer, self._queries(x, rotation, context), self._params)
        out: Tensor = self.o_proj(attended.flatten(1), self._group.all_reduce)
        return out

    def _queries(self, x: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """Project and rotate queries, after passing on keys and values."""
        if context.kv_first:
            self._put(self.qkv_proj.project(x, slice(self.q_size, None)), rotation, context)
            q = self.qkv_proj.project(take(x, context.wanted), slice(self.q_size))
            rotation = rotation.take(context.wanted)
        else:
            qkv = self.qkv_proj(x)
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
