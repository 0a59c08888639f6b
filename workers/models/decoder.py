"""Decoder of any supported model family, built from its configuration."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from workers.device import Device
from workers.layers.attention import Attention, AttentionContext, take
from workers.layers.attention_config import LatentAttentionConfig
from workers.layers.config import MoeConfig
from workers.layers.feed_forward import Experts, GatedMLP, MoeBlock
from workers.layers.latent_attention import LatentAttention, LatentHeads
from workers.layers.linear import Embedding, LinearLayer, RMSNorm
from workers.layers.matmul import PackedMatrix
from workers.layers.projections import Projections, make_projections
from workers.layers.rotary import RotaryEmbedding, Rotation
from workers.layers.shard import ShardedLayer, WeightShard
from workers.memory.huge_pages import use_huge_pages
from workers.models.interface import DecoderConfig
from workers.native.library import Library
from workers.parallel.exchanges import Lens
from workers.parallel.model_groups import ModelGroups
from workers.quant.fp8_matrix import Fp8Matrix


class Residual:
    """Hidden states between two blocks: terms ``[rows, hidden_size]`` that the next norm adds.

    Nothing else refers to the terms, so that they take no memory once their sum has replaced them.
    """

    def __init__(self, hidden: Tensor, added: Tensor | None = None) -> None:
        """Create the terms. ``added`` is the output of the latest block. None if it is part of ``hidden``."""
        self.hidden, self.added = hidden, added

    def normed(self, norm: RMSNorm) -> Tensor:
        """Add the terms, and return their normalized sum."""
        self.hidden, normed = norm.of_sum(self.hidden, self.added)
        self.added = None
        return normed


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int, groups: ModelGroups, projections: Projections) -> None:
        """Build the layer. ``layer`` is its index in the model. A stage's layers are built in order."""
        super().__init__()
        hidden_size, eps, feed_forward = config.hidden_size, config.rms_norm_eps, config.feed_forward[layer]
        first_layer = groups.layers(config.num_layers).start
        self.input_layernorm = RMSNorm(hidden_size, eps)
        attention, stage_layer = config.attention_of(layer), layer - first_layer
        self.self_attn: Attention | LatentAttention = (
            LatentAttention(hidden_size, attention, config.rope, stage_layer, groups.tp, projections)
            if isinstance(attention, LatentAttentionConfig)
            else Attention(hidden_size, attention, eps, stage_layer, groups.tp, projections, config.windows[layer])
        )
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.mlp: GatedMLP | MoeBlock = (
            MoeBlock(hidden_size, feed_forward, groups)
            if isinstance(feed_forward, MoeConfig)
            else GatedMLP(hidden_size, feed_forward.intermediate_size, groups, bias=feed_forward.bias)
        )

    def forward(self, residual: Residual, rotation: Rotation, context: AttentionContext, lens: Lens) -> None:
        """Replace the terms [num_tokens, hidden_size] by terms [num_queries, hidden_size]."""
        residual.added = self.self_attn(residual.normed(self.input_layernorm), rotation, context)
        residual.hidden = take(residual.hidden, context.query_rows)
        given = (lens, context.counted) if isinstance(self.mlp, MoeBlock) else (lens,)
        residual.added = self.mlp(residual.normed(self.post_attention_layernorm), *given)


class DecoderModel(nn.Module):
    """One rank's part of a decoder, for inference only. Parameters are uninitialized at first.

    TP ranks hold shards of the weights and make the same calls with the same tokens.
    """

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: Device, groups: ModelGroups | None = None
    ) -> None:
        """Build one rank's part of the model. If ``groups`` is None, that part is the entire model.

        Raises UnsupportedModelError if the heads, layers or experts cannot be divided among the ranks.
        """
        super().__init__()
        self.groups = groups = groups or ModelGroups()
        self.dtype, self.device = dtype, device
        config.check_layout(groups.parallel)
        stage = groups.layers(config.num_layers)
        self.config = config.of_rank(groups.tp.size, stage)
        """Configuration of this rank's part."""
        self.is_first, self.is_last = 0 in stage, config.num_layers - 1 in stage
        shares = (*config.shares_selection, False)
        self.begins_shared, self.ends_shared = shares[stage.start], shares[stage.stop]
        """Flags for the first layer of this stage, and of the next one: True if it uses keys that the layer before it,
        in the stage before, has selected.
        """
        is_tied = config.tie_word_embeddings
        if self.is_first or (self.is_last and is_tied):
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, groups.tp)
        projections = make_projections(groups)
        layers = {str(layer): DecoderLayer(config, layer, groups, projections) for layer in stage}
        self.layers = nn.ModuleDict(layers)
        self.attention = layers[str(stage.start)].self_attn.shape
        """Attention shape of the first layer. Other layers can differ only in their windows and indexers."""
        if self.is_last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            tied = self.embed_tokens if is_tied else None
            self.lm_head = tied or Embedding(config.vocab_size, config.hidden_size, groups.tp)
        self.rotary = RotaryEmbedding(config.rope, config.attention.rope_dim, device.torch_device)

    def forward(
        self, token_ids: Tensor, positions: Tensor, context: AttentionContext, hidden: Tensor | None = None
    ) -> Tensor:
        """Return hidden states after this stage's layers.

        The last stage normalizes them, and returns only those of the queries of `context.last_layer`.

        Args:
            token_ids: int64 [num_tokens], this rank's tokens of all requests, concatenated. May be empty.
            positions: int64 [num_tokens].
            context: keys and values of the step.
            hidden: output of the previous stage. None in the first stage.

        Returns:
            [num_tokens or num_queries, hidden_size], the same on every TP rank.
        """
        rotation = self.rotary(positions, self.dtype)
        residual = Residual(self.embed_tokens(token_ids) if hidden is None else hidden)
        *before, final = self.layers.values()
        for layer in before:
            layer(residual, rotation, context, context.lens)
        if not self.is_last:
            final(residual, rotation, context, context.lens)
            assert residual.added is not None, "a layer ends with a block"
            return residual.hidden + residual.added
        final(residual, rotation, context.last_layer, context.last_layer_lens)
        return residual.normed(self.norm)

    def selected_keys(self, context: AttentionContext) -> int | None:
        """Return the number of keys that a query uses in this step; None if it uses all visible ones."""
        attention = self.config.attention
        return attention.selected_keys(context.most_keys) if isinstance(attention, LatentAttentionConfig) else None

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden [num_rows, hidden_size] to fp32 logits [num_rows, vocab_size]. Only for the last stage."""
        return self.lm_head.scores(hidden).float()

    def weights(self) -> dict[str, WeightShard]:
        """Return this rank's shards of all tensors that the checkpoint must contain, by the names in the checkpoint."""
        return {name: shard for _, shards in self.weights_by_layer() for name, shard in shards.items()}

    def weights_by_layer(self) -> Iterator[tuple[ShardedLayer, dict[str, WeightShard]]]:
        """Yield every layer that has weights, and its part of ``weights``."""
        name_of = self.config.checkpoint_name
        for path, module in self.named_modules():
            if isinstance(module, ShardedLayer):
                yield module, {name_of(f"{path}.{name}"): shard for name, shard in module.weights()}

    @property
    def fp8_bytes(self) -> int:
        """Return the bytes of the matrices in FP8 and their scales."""
        return sum(matrix.nbytes for matrix in self._attributes() if isinstance(matrix, Fp8Matrix))

    @property
    def products(self) -> str:
        """Return the format of matrix products if some are not in the model's dtype; otherwise an empty string."""
        if not self.fp8_bytes:
            return ""
        # Projections that CP ranks hold together are dequantized.
        return "fp8" if self.groups.linear_shards is None else "fp8, without projections"

    def packed_matrices(self) -> list[PackedMatrix]:
        """Return all weights that are packed."""
        return [matrix for matrix in self._attributes() if isinstance(matrix, PackedMatrix)]

    def pack(self, library: Library | None = None) -> None:
        """Rearrange loaded weights for speed, and in host memory, put them into huge pages.

        ``library`` is native code for this model, if there is any.
        """
        for module in self.modules():
            if isinstance(module, LinearLayer | Experts | LatentHeads):
                module.pack(library)
        if self.is_last:
            self.lm_head.pack(library, is_read=self.is_first and self.config.tie_word_embeddings)
        if not self.device.has_own_memory:
            for parameter in self.parameters():
                use_huge_pages(parameter.data_ptr(), parameter.nbytes)
            for packed in self.packed_matrices():
                use_huge_pages(packed.address, packed.matrix.nbytes)

    def _attributes(self) -> Iterator[object]:
        """Yield all attributes of layers, and the items of lists, except parameters and modules."""
        for module in self.modules():
            for value in vars(module).values():
                yield from value if isinstance(value, list) else [value]
