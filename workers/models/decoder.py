"""The decoder of the Llama, Qwen and Mixtral families; what differs between them is in ModelConfig."""

import torch
from torch import Tensor, nn

from workers.layers.attention import Attention
from workers.layers.embedding import Embedding
from workers.layers.gated_mlp import GatedMLP
from workers.layers.moe_block import MoeBlock
from workers.layers.rms_norm import RMSNorm
from workers.layers.rotary import RotaryEmbedding, Rotation
from workers.models.config import ModelConfig
from workers.models.interface import AttentionContext, take
from workers.parallel.model_groups import ModelGroups


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, groups: ModelGroups) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, groups.tp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        moe = config.moe_of(layer)
        self.mlp: GatedMLP | MoeBlock = (
            GatedMLP(config.hidden_size, config.intermediate_size, groups, bias=config.mlp_bias)
            if moe is None
            else MoeBlock(config.hidden_size, moe, groups)
        )

    def forward(self, hidden: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """hidden [num_tokens, hidden_size] -> [num_wanted, hidden_size]."""
        hidden = take(hidden, context.wanted) + self.self_attn(self.input_layernorm(hidden), rotation, context)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden), context.lens)
        return out


class DecoderModel(nn.Module):
    """For inference only. Parameters are uninitialised until `workers.engine.weights` fills them.

    Submodules bear the checkpoint's names, except that projections of one input are fused. TP ranks hold parts of
    the weights, `config` tells this rank's; every one of them makes the same calls with the same tokens.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, groups: ModelGroups | None = None
    ) -> None:
        """`groups` are the ranks that compute together; none for the whole model on one.

        Raises UnsupportedModelError when so many ranks cannot share the heads or the experts.
        """
        super().__init__()
        self.groups = groups = groups or ModelGroups()
        group = groups.tp
        self.config, self.dtype, self.device = config.of_rank(group.size), dtype, device
        config.check_experts(groups.parallel.ep)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, group)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, groups) for layer in range(config.num_layers))
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
