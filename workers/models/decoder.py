"""The dense decoder of the Llama, Qwen2 and Qwen3 families; what differs between them is in ModelConfig."""

import torch
from torch import Tensor, nn

from workers.layers.attention import Attention
from workers.layers.embedding import Embedding
from workers.layers.gated_mlp import GatedMLP
from workers.layers.rms_norm import RMSNorm
from workers.layers.rotary import RotaryEmbedding, Rotation
from workers.models.config import ModelConfig
from workers.models.interface import AttentionContext


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(self, hidden: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, context)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class DecoderModel(nn.Module):
    """For inference only. Parameters are uninitialised until `workers.engine.weights` fills them.

    Submodules bear the checkpoint's names, except that projections of one input are fused.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, device
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device)

    def forward(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states after the final norm.

        token_ids and positions: int64 [num_tokens], this rank's tokens of all requests one after another, any number
        of them, none included. Returns [num_tokens, hidden_size].
        """
        rotation = self.rotary(positions, self.dtype)
        hidden: Tensor = self.embed_tokens(token_ids)
        for layer in self.layers:
            hidden = layer(hidden, rotation, context)
        normed: Tensor = self.norm(hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size], as `forward` returns it -> [num_rows, vocab_size] in fp32."""
        return self.lm_head.scores(hidden).float()
