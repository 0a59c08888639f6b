"""Description of a checkpoint by its family, and the four questions that everyone else asks it. Loads no torch.

1. What layers does the model have? `workers.models.decoder` builds them from the tree.
2. What does the checkpoint call a weight? `checkpoint_name`, `copies`, `is_ignored`; how each is sharded, layers know.
3. What does it store for each token? `kv_groups`.
4. What does it cost? `layer_weights`, `cost`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cluster.spec.checks import ModelLimits, layout_problems, ring_problems
from cluster.spec.config import ParallelConfig, PrefillConfig
from cluster.spec.kv import DTYPE_BYTES, KvGeometry, KvGroup, key_value_group
from workers.context_parallel.cost_model import ModelShape
from workers.layers.config import AttentionConfig, FeedForwardConfig, MoeConfig, RopeConfig
from workers.models.hf_config import Dtype, HfConfig, UnsupportedModelError

INPUT_TABLE = "embed_tokens.weight"
OUTPUT_TABLE = "lm_head.weight"
_FUSED = ("qkv_proj", "gate_up_proj")
"""Modules of ours whose projections stand apart in a checkpoint."""


class LayerWeights(NamedTuple):
    """Matrix elements of one layer, by what divides them; each costs a token 2 FLOPs."""

    queries: int
    """Projections to queries and out of attention, which TP ranks share."""
    kv: int
    """Projections to keys and values, which TP ranks share, as far as KV heads go."""
    dense: int
    """The MLP, or the shared expert, which DP and TP ranks share."""
    experts: int
    """All routed experts."""
    routed: int
    """The routed experts of one token."""

    @property
    def used(self) -> int:
        return self.queries + self.kv + self.dense + self.routed


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Configuration of a decoder: a token table, layers of attention and feed-forward, a norm, and an output table."""

    vocab_size: int
    hidden_size: int
    attention: AttentionConfig
    """Attention, the same in all layers."""
    feed_forward: tuple[FeedForwardConfig, ...]
    """Feed-forward part by layer."""
    windows: tuple[int | None, ...]
    """Tokens that a token of each layer can see, itself included; None if all."""
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: Dtype
    """Number format that the checkpoint was saved in."""
    eos_token_ids: tuple[int, ...]
    """Any of these ends an answer; empty where the checkpoint names none."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Modules that the checkpoint names differently from most, with its names for them."""

    def __post_init__(self) -> None:
        attention = self.attention
        if attention.num_heads % attention.num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads ({attention.num_heads}) is not a multiple of "
                f"num_key_value_heads ({attention.num_kv_heads})"
            )
        if attention.head_dim % 2:
            raise UnsupportedModelError(f"head_dim must be even for rotary positions, but is {attention.head_dim}")

    @property
    def num_layers(self) -> int:
        """Layers of the model, or of one rank's part of it."""
        return len(self.feed_forward)

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """KV heads of every layer."""
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.attention.head_dim

    @property
    def moe(self) -> MoeConfig | None:
        """Experts of a layer that has some; None in dense models."""
        return next((layer for layer in self.feed_forward if isinstance(layer, MoeConfig)), None)

    def of_rank(self, tp_size: int, layers: range) -> "DecoderConfig":
        """Return the shape of what one rank computes: its heads, its part of each width, its stage's layers."""
        return replace(
            self,
            attention=self.attention.of_rank(tp_size),
            feed_forward=tuple(self.feed_forward[layer].of_rank(tp_size) for layer in layers),
            windows=tuple(self.windows[layer] for layer in layers),
        )

    @property
    def limits(self) -> ModelLimits:
        """Numbers that ranks must be able to share."""
        return ModelLimits(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            num_layers=self.num_layers,
            num_experts=self.moe.num_experts if self.moe else None,
            has_windows=any(group.window is not None for group in self.kv_groups(self.dtype)),
        )

    def check_layout(self, parallel: ParallelConfig, path: str = "parallel") -> None:
        """Raise UnsupportedModelError if ranks cannot share the heads, the layers or the experts."""
        if problems := layout_problems(parallel, path, self.limits):
            raise UnsupportedModelError("; ".join(map(str, problems)))

    def check_ring(self, prefill: PrefillConfig) -> None:
        """Raise UnsupportedModelError if prefill ranks cannot each hold a part of the pages."""
        if problems := ring_problems(prefill, self.limits):
            raise UnsupportedModelError("; ".join(map(str, problems)))

    def checkpoint_name(self, path: str) -> str:
        """Return the checkpoint's name for a weight, by its path in the model."""
        names = [self.renamed.get(part, part) for part in path.split(".") if part not in _FUSED]
        root = [] if path == OUTPUT_TABLE else ["model"]
        return ".".join(root + names)

    @property
    def copies(self) -> Mapping[str, str]:
        """Weights that a checkpoint may hold a second time, with the names of the first."""
        return {OUTPUT_TABLE: self.checkpoint_name(INPUT_TABLE)} if self.tie_word_embeddings else {}

    def is_ignored(self, name: str) -> bool:
        """Return whether a checkpoint's tensor is computed here instead: rotary frequencies, which old ones store."""
        return name.endswith(".rotary_emb.inv_freq")

    def kv_groups(self, dtype: str) -> tuple[KvGroup, ...]:
        layers: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.windows):
            layers.setdefault(window, []).append(layer)
        return tuple(
            key_value_group(of_window, self.num_kv_heads, self.head_dim, dtype, window)
            for window, of_window in layers.items()
        )

    def kv_geometry(self, name: str, dtype: str, page_size: int) -> KvGeometry:
        """Return the KV of the model as served under a name."""
        return KvGeometry(model=name, num_layers=self.num_layers, groups=self.kv_groups(dtype), page_size=page_size)

    def layer_weights(self, layer: int) -> LayerWeights:
        """Count the weights of one layer; norms, biases and routers, which are next to nothing, are left out."""
        hidden, feed_forward = self.hidden_size, self.feed_forward[layer]
        moe = feed_forward if isinstance(feed_forward, MoeConfig) else None
        expert = 3 * hidden * moe.intermediate_size if moe else 0
        return LayerWeights(
            queries=2 * hidden * self.attention.q_size,
            kv=2 * hidden * self.attention.kv_size,
            dense=3 * hidden * feed_forward.dense_size,
            experts=expert * moe.num_experts if moe else 0,
            routed=expert * moe.top_k if moe else 0,
        )

    def cost(self, dtype: str) -> ModelShape:
        """Return the work of a token in a layer, averaged over layers, computed in a dtype."""
        layers = [self.layer_weights(layer) for layer in range(self.num_layers)]
        used = sum(layer.used for layer in layers)
        return ModelShape(
            num_layers=self.num_layers,
            linear_flops=2 * used // self.num_layers,
            kv_flops=2 * layers[0].kv,
            attention_flops=4 * self.attention.q_size,
            kv_row_bytes=2 * self.attention.kv_size * DTYPE_BYTES[dtype],
            q_row_bytes=self.attention.q_size * DTYPE_BYTES[dtype],
        )


Family = Callable[[HfConfig], DecoderConfig]
"""A family of models: reads a config.json of its own; raises UnsupportedModelError for what the engine cannot run."""
