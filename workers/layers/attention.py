"""The attention half of a decoder layer: project, rotate, attend through the engine's context, project back."""

from torch import Tensor, nn

from workers.layers.linear import FusedLinear, Linear
from workers.layers.rms_norm import RMSNorm
from workers.layers.rotary import Rotation
from workers.models.config import ModelConfig
from workers.models.interface import AttentionContext


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.sizes = (q_size, kv_size, kv_size)
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """x [num_tokens, hidden_size] -> the same shape."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj(x).split(self.sizes, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        context.put(self.layer, rotation.apply(k), v)
        attended = context.attend(self.layer, rotation.apply(q))
        out: Tensor = self.o_proj(attended.flatten(1))
        return out
