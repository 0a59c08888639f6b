"""The decoder of the Llama, Qwen and Mixtral families; what differs between them is in ModelConfig."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from workers.expert_parallel.sharing import Lens
from workers.layers.attention import Attention
from workers.layers.embedding import Embedding
from workers.layers.gated_mlp import GatedMLP
from workers.layers.linear import FusedLinear, SummedLinear
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
        self.self_attn = Attention(config, layer - groups.layers(config.num_layers).start, groups.tp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        moe = config.moe_of(layer)
        self.mlp: GatedMLP | MoeBlock = (
            GatedMLP(config.hidden_size, config.intermediate_size, groups, bias=config.mlp_bias)
            if moe is None
            else MoeBlock(config.hidden_size, moe, groups)
        )

    def forward(
        self, hidden: Tensor, added: Tensor | None, rotation: Rotation, context: AttentionContext, lens: Lens
    ) -> tuple[Tensor, Tensor]:
        """Two terms [num_tokens, hidden_size] -> two [num_wanted, hidden_size], for the next norm to add up."""
        hidden, normed = self.input_layernorm.of_sum(hidden, added)
        attended = self.self_attn(normed, rotation, context)
        hidden, normed = self.post_attention_layernorm.of_sum(take(hidden, context.wanted), attended)
        is_moe = isinstance(self.mlp, MoeBlock)
        return hidden, self.mlp(normed, lens, context.counted) if is_moe else self.mlp(normed, lens)


class DecoderModel(nn.Module):
    """For inference only. Parameters are uninitialised until `workers.engine.weights` fills them.

    Submodules bear the checkpoint's names, except that projections of one input are fused. TP ranks hold parts of
    the weights, `config` tells this rank's; every one of them makes the same calls with the same tokens.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, groups: ModelGroups | None = None
    ) -> None:
        """`groups` are the ranks that compute together; none for the whole model on one.

        Raises UnsupportedModelError when so many ranks cannot share the heads, the layers or the experts.
        """
        super().__init__()
        self.groups = groups = groups or ModelGroups()
        group = groups.tp
        self.dtype, self.device = dtype, device
        config.check_cut(groups.parallel)
        self.num_layers = config.num_layers
        """Of the whole model."""
        stage = groups.layers(config.num_layers)
        self.config = replace(config.of_rank(group.size), num_layers=len(stage))
        """Of this rank's part."""
        self.is_first, self.is_last = 0 in stage, config.num_layers - 1 in stage
        is_tied = config.tie_word_embeddings
        if self.is_first or (self.is_last and is_tied):
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, group)
        self.layers = nn.ModuleDict({str(layer): DecoderLayer(config, layer, groups) for layer in stage})
        if self.is_last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            tied = self.embed_tokens if is_tied else None
            self.lm_head = tied or Embedding(config.vocab_size, config.hidden_size, group)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device)

    def forward(
        self, token_ids: Tensor, positions: Tensor, context: AttentionContext, hidden: Tensor | None = None
    ) -> Tensor:
        """Hidden states after this stage's layers; after the last one's those wanted in `context.last`, normed.

        token_ids and positions: int64 [num_tokens], this rank's tokens of all requests one after another, any number
        of them, none included. hidden: what the stage before gave, None for the first.
        Returns [num_tokens or num_wanted, hidden_size], whole on every TP rank.
        """
        rotation = self.rotary(positions, self.dtype)
        hidden = self.embed_tokens(token_ids) if hidden is None else hidden
        added: Tensor | None = None
        *before, final = self.layers.values()
        for layer in before:
            hidden, added = layer(hidden, added, rotation, context, context.lens)
        if not self.is_last:
            hidden, added = final(hidden, added, rotation, context, context.lens)
            return hidden + added
        _, normed = self.norm.of_sum(*final(hidden, added, rotation, context.last, context.last_lens))
        return normed

    def pack(self) -> None:
        """Rearrange weights for speed, once they are filled."""
        for module in self.modules():
            if isinstance(module, FusedLinear | SummedLinear):
                module.pack()
        if self.is_last:
            self.lm_head.pack(is_read=self.is_first and self.config.tie_word_embeddings)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the last stage: hidden [num_rows, hidden_size], from `forward` -> [num_rows, vocab_size] in fp32."""
        return self.lm_head.scores(hidden).float()
