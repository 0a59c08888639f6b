"""The attention half of a decoder layer: project, rotate, attend through the engine's context, project back."""

from torch import Tensor, nn

from workers.attention.params import AttentionParams
from workers.layers.config import AttentionConfig
from workers.layers.context import AttentionContext, take
from workers.layers.linear import FusedLinear, SummedLinear
from workers.layers.rms_norm import RMSNorm
from workers.layers.rotary import Rotation
from workers.layers.shard import TpGroup, even_shard, kv_head_shard


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
