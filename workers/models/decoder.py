"""The dense decoder of the Llama, Qwen2 and Qwen3 families; what differs between them is in ModelConfig."""

import torch
from torch import Tensor, nn

from workers.layers.attention import Attention
from workers.layers.cut import TpGroup
from workers.layers.embedding import Embedding
from workers.layers.gated_mlp import GatedMLP
from workers.layers.rms_norm import RMSNorm
from workers.layers.rotary import RotaryEmbedding, Rotation
from workers.models.config import ModelConfig
from workers.models.interface import AttentionContext, take
from workers.parallel.collectives import Communicator


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, group: TpGroup) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, group)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, group, bias=config.mlp_bias)

    def forward(self, hidden: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """hidden [num_tokens, hidden_size] -> [num_wanted, hidden_size]."""
        hidden = take(hidden, context.wanted) + self.self_attn(self.input_layernorm(hidden), rotation, context)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class DecoderModel(nn.Module):
    """For inference only. Parameters are uninitialised until `workers.engine.weights` fills them.

    Submodules bear the checkpoint's names, except that projections of one input are fused. TP ranks hold parts of
    the weights, `config` tells this rank's; every one of them makes the same calls with the same tokens.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, group: Communicator | None = None
    ) -> None:
        """`group` are the TP ranks that compute together; none for the whole model on one.

        Raises UnsupportedModelError when so many ranks cannot share the heads.
        """
        super().__init__()
        self.group = group = group or Communicator("attn_tp")
        self.config, self.dtype, self.device = config.of_rank(group.size), dtype, device
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, group)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, group) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = Embedding(config.vocab_size, config.hidden_size, group)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device)

    def forward(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states after the final norm, of the tokens that are wanted in `context.last`.

        token_ids and positions: int64 [num_tokens], this rank's tokens of all requests one after another, any number
        of them, none included. Returns [num_wanted, hidden_size], whole on every TP rank.
        """
        rotation = self.rotary(positions, self.dtype)
        hidden: Tensor = self.embed_tokens(token_ids)
        for layer in self.layers[:-1]:
            hidden = layer(hidden, rotation, context)
        hidden = self.layers[-1](hidden, rotation, context.last)
        normed: Tensor = self.norm(hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size], as `forward` returns it -> [num_rows, vocab_size] in fp32."""
        return self.lm_head.scores(hidden).float()
