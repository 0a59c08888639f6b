"""The attention half of a decoder layer: project, rotate, attend through the engine's context, project back."""

from torch import Tensor, nn

from workers.layers.cut import TpGroup, even_cut, kv_head_cut
from workers.layers.linear import FusedLinear, SummedLinear
from workers.layers.rms_norm import RMSNorm
from workers.layers.rotary import Rotation
from workers.models.config import ModelConfig
from workers.models.interface import AttentionContext, take


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, group: TpGroup) -> None:
        super().__init__()
        self.layer, self.head_dim, self._group = layer, config.head_dim, group
        q = even_cut(config.num_heads * config.head_dim, group)
        kv = kv_head_cut(config.num_kv_heads, config.head_dim, group)
        self.q_size = q.size
        self.qkv_proj = FusedLinear(config.hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv}, bias=config.qkv_bias)
        self.o_proj = SummedLinear(q, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """x [num_tokens, hidden_size] -> [num_wanted, hidden_size]."""
        attended = context.attend(self.layer, self._queries(x, rotation, context))
        out: Tensor = self.o_proj(attended.flatten(1), self._group.all_reduce)
        return out

    def _queries(self, x: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """Rotated; keys and values are handed over before."""
        if context.kv_first:
            self._put(self.qkv_proj.project(x, slice(self.q_size, None)), rotation, context)
            q = self.qkv_proj.project(take(x, context.wanted), slice(self.q_size))
            rotation = rotation.take(context.wanted)
        else:
            qkv = self.qkv_proj(x)
            if (place := context.place(self.layer)) is not None:
                return rotation.apply_storing(self._split_heads(qkv), self.q_norm, self.k_norm, place)
            q, kv = qkv.tensor_split((self.q_size,), dim=-1)
            self._put(kv, rotation, context)
        return rotation.apply(self._split_heads(q), self.q_norm)

    def _put(self, kv: Tensor, rotation: Rotation, context: AttentionContext) -> None:
        k, v = self._split_heads(kv).chunk(2, dim=1)
        context.put(self.layer, rotation.apply(k, self.k_norm), v)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), x.shape[1] // self.head_dim, self.head_dim)
