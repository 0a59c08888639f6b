"""Model configuration of any family, with the answers to four questions. Does not import torch.

1. What layers does the model have? `workers.models.decoder` builds them from the configuration.
2. What does the checkpoint call a weight, and how does it store it? `checkpoint_name`, `copies`, `is_ignored`,
   `weight_format`. Layers know how it is sharded.
3. What does the model store for each token? `kv_groups`.
4. What does the model cost? `layer_costs`, `experts_per_token`, `cost`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from cluster.spec.checks import ModelLimits, layout_problems, ring_problems
from cluster.spec.config import AnyParallel, ModelConfig, PrefillConfig
from cluster.spec.errors import UserError
from cluster.spec.kv import DTYPE_BYTES, KvGeometry, KvGroup, KvPart, attention_group
from cluster.spec.linear_shards import LinearShards
from cluster.spec.strategy import MoeDispatch
from workers.context_parallel.cost_model import ModelShape
from workers.expert_parallel.dispatch_cost import BlockShape, ExpertExchange
from workers.layers.attention_config import AnyAttentionConfig, AttentionForm, LatentAttentionConfig
from workers.layers.config import FeedForwardConfig, MoeConfig, RopeConfig
from workers.quant.interface import WeightFormat

Dtype = Literal["float32", "bfloat16", "float16"]
INPUT_TABLE = "embed_tokens.weight"
OUTPUT_TABLE = "lm_head.weight"
_FUSED = ("qkv", "gate_up", "latents", "query_heads", "first", "rest")
"""Modules that group projections, which checkpoints store separately."""
_USUAL_NAMES = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "out": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "router": "gate",
    "q_a": "q_a_proj",
    "q_b": "q_b_proj",
    "kv_a": "kv_a_proj_with_mqa",
    "kv_b": "kv_b_proj",
    "q_a_norm": "q_a_layernorm",
    "kv_a_norm": "kv_a_layernorm",
}
"""Names that most checkpoints give to modules, by their names in `workers.layers`, where the two differ."""


class UnsupportedModelError(UserError):
    """Checkpoint that this engine cannot run as intended. The message says what was given and what is allowed."""


class LayerCost(NamedTuple):
    """Numbers of matrix elements in one layer, by how they are sharded, and its forms of attention.

    Each element used costs 2 FLOPs per token.
    """

    queries: int
    """Projections of all heads' queries and outputs, sharded over TP ranks."""
    kv: int
    """Projections to what is stored, sharded over as many TP ranks as there are KV heads."""
    whole: int
    """Low-rank query projection and indexer, which every TP rank holds."""
    dense: int
    """MLP or shared expert, sharded over DP and TP ranks."""
    experts: int
    routed: int
    """Experts that one token uses."""
    experts_per_token: int
    """Number of experts that compute each token. 0 for a layer without experts."""
    forms: tuple[AttentionForm, ...]
    """Forms in which the layer can compute attention."""
    index_flops: int
    """FLOPs per (query, key) pair to select keys."""

    @property
    def used(self) -> int:
        return self.queries + self.kv + self.whole + self.dense + self.routed


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Configuration of a decoder: embeddings, layers of attention and feed-forward, a norm, and an output table."""

    vocab_size: int
    hidden_size: int
    attention: AnyAttentionConfig
    feed_forward: tuple[FeedForwardConfig, ...]
    """Feed-forward part by layer."""
    windows: tuple[int | None, ...]
    """Number of tokens that a token sees in each layer, including itself. None if it sees all."""
    shares_selection: tuple[bool, ...]
    """Flags by layer, True if it uses the keys that the layer before it has selected."""
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: Dtype
    renamed: Mapping[str, str]
    """Checkpoint names of modules that differ from the usual names, by module name."""
    num_draft_layers: int
    """Number of layers for speculative decoding that a checkpoint may contain after the others. They are ignored."""
    weight_format: WeightFormat
    """Format in which the checkpoint stores weights."""

    def __post_init__(self) -> None:
        attention = self.attention
        if attention.num_heads % attention.num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads ({attention.num_heads}) is not a multiple of "
                f"num_key_value_heads ({attention.num_kv_heads})"
            )
        if attention.rope_dim % 2:
            raise UnsupportedModelError(f"head_dim must be even for rotary positions, but is {attention.rope_dim}")

    @property
    def num_layers(self) -> int:
        return len(self.feed_forward)

    def of_rank(self, tp_size: int, layers: range) -> "DecoderConfig":
        """Return one rank's part: its heads, its shard of each width, and its stage's layers."""
        return replace(
            self,
            attention=self.attention.of_rank(tp_size),
            feed_forward=tuple(self.feed_forward[layer].of_rank(tp_size) for layer in layers),
            windows=tuple(self.windows[layer] for layer in layers),
            shares_selection=tuple(self.shares_selection[layer] for layer in layers),
        )

    def attention_of(self, layer: int) -> AnyAttentionConfig:
        attention = self.attention
        if isinstance(attention, LatentAttentionConfig) and self.shares_selection[layer]:
            return replace(attention, shares_selection=True)
        return attention

    @property
    def moe(self) -> MoeConfig | None:
        """Return the experts of the first layer that has any; None for dense models."""
        return next((layer for layer in self.feed_forward if isinstance(layer, MoeConfig)), None)

    @property
    def selects_keys(self) -> bool:
        """Return whether a query uses only some of the keys that it sees."""
        return isinstance(self.attention, LatentAttentionConfig) and self.attention.indexer is not None

    @property
    def limits(self) -> ModelLimits:
        """Return the limits on how the model can be divided among ranks."""
        return ModelLimits(
            num_heads=self.attention.num_heads,
            num_kv_heads=self.attention.num_kv_heads,
            num_layers=self.num_layers,
            num_experts=self.moe.num_experts if self.moe else None,
            has_windows=any(window is not None for window in self.windows),
        )

    def check_layout(self, parallel: AnyParallel, path: str = "parallel") -> None:
        """Raise UnsupportedModelError if the heads, layers or experts cannot be divided among the ranks."""
        if problems := layout_problems(parallel, path, self.limits):
            raise UnsupportedModelError("; ".join(map(str, problems)))

    def check_ring(self, prefill: PrefillConfig) -> None:
        """Raise UnsupportedModelError if prefill ranks cannot each hold a part of the pages."""
        if problems := ring_problems(prefill, self.limits):
            raise UnsupportedModelError("; ".join(map(str, problems)))

    def checkpoint_name(self, path: str) -> str:
        """Return the checkpoint's name for a weight, given its path in the model."""
        names = {**_USUAL_NAMES, **self.renamed}
        root = [] if path == OUTPUT_TABLE else ["model"]
        return ".".join(root + [names.get(part, part) for part in path.split(".") if part not in _FUSED])

    @property
    def copies(self) -> Mapping[str, str]:
        """Return the names of redundant copies that a checkpoint may contain, mapped to their originals."""
        return {OUTPUT_TABLE: self.checkpoint_name(INPUT_TABLE)} if self.tie_word_embeddings else {}

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor belongs to a draft layer or to the indexer of a layer that shares a selection, or
        holds rotary frequencies, which the engine computes.
        """
        drafts = range(self.num_layers, self.num_layers + self.num_draft_layers)
        unused = [f"model.layers.{layer}." for layer in drafts]
        unused += [
            f"model.layers.{layer}.self_attn.indexer." for layer, shares in enumerate(self.shares_selection) if shares
        ]
        return name.endswith(".rotary_emb.inv_freq") or name.startswith(tuple(unused))

    def kv_groups(self, dtype: str) -> tuple[KvGroup, ...]:
        layers: dict[tuple[int | None, tuple[KvPart, ...]], list[int]] = {}
        for layer, window in enumerate(self.windows):
            layers.setdefault((window, self.attention_of(layer).kv_parts(dtype)), []).append(layer)
        return tuple(
            attention_group(alike, self.attention.num_kv_heads, parts, window)
            for (window, parts), alike in layers.items()
        )

    def served_dtype(self, served: ModelConfig) -> str:
        """Return the data type of weights and KV."""
        return self.dtype if served.dtype == "auto" else served.dtype

    def kv_geometry(self, name: str, dtype: str, page_size: int) -> KvGeometry:
        return KvGeometry(model=name, num_layers=self.num_layers, groups=self.kv_groups(dtype), page_size=page_size)

    @cached_property
    def layer_costs(self) -> tuple[LayerCost, ...]:
        """Cost by layer, without norms, biases and routers, which are negligible."""
        return tuple(map(self._layer_cost, range(self.num_layers)))

    def _layer_cost(self, layer: int) -> LayerCost:
        hidden, feed_forward = self.hidden_size, self.feed_forward[layer]
        moe = feed_forward if isinstance(feed_forward, MoeConfig) else None
        attention = self.attention_of(layer).cost(hidden)
        expert = 3 * hidden * moe.intermediate_size if moe else 0
        per_token = moe.top_k if moe else 0
        return LayerCost(
            queries=attention.sharded,
            kv=attention.kv,
            whole=attention.whole,
            dense=3 * hidden * feed_forward.dense_size,
            experts=expert * moe.num_experts if moe else 0,
            routed=expert * per_token,
            experts_per_token=per_token,
            forms=attention.forms,
            index_flops=attention.index_flops,
        )

    @property
    def num_weights(self) -> int:
        """Return the number of elements in all matrices, without routers. Tied tables count once."""
        layers = sum(cost.queries + cost.kv + cost.whole + cost.dense + cost.experts for cost in self.layer_costs)
        return layers + (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size

    @property
    def experts_per_token(self) -> int:
        """Return the maximum number of experts that compute one token in a layer; 0 for dense models."""
        return max(layer.experts_per_token for layer in self.layer_costs)

    def received_bytes(self, dtype: str, shards: LinearShards | None) -> int:
        """Return the bytes of projections that a CP rank receives for a layer of which it stores none or a part."""
        if shards is None:
            return 0
        shapes = self.attention.projections(self.hidden_size)
        return sum(shards.received_rows(shape.outputs) * shape.inputs for shape in shapes) * DTYPE_BYTES[dtype]

    @property
    def expert_share(self) -> float:
        """Return the fraction of layers that have experts."""
        return sum(layer.experts > 0 for layer in self.layer_costs) / self.num_layers

    def sum_bytes(self, dtype: str, *, in_background: bool) -> int:
        """Return the bytes of a hidden state in an all-reduce. Terms travel in fp32, except in shared memory."""
        return self.hidden_size * DTYPE_BYTES["float32" if in_background else dtype]

    def expert_exchange(
        self, parallel: AnyParallel, dtype: str, dispatch: MoeDispatch, *, waits_for_counts: bool, in_background: bool
    ) -> ExpertExchange | None:
        """Return the exchange of tokens between ranks with experts; None for dense models."""
        if self.moe is None:
            return None
        return ExpertExchange(
            block=BlockShape.of(parallel, self.moe.top_k, self.moe.router.reach),
            dp=parallel.dp,
            dispatch=dispatch,
            waits_for_counts=waits_for_counts,
            row_bytes=self.hidden_size * DTYPE_BYTES[dtype],
            sum_bytes=self.sum_bytes(dtype, in_background=in_background),
        )

    def cost(self, dtype: str, shards: LinearShards | None = None, experts: ExpertExchange | None = None) -> ModelShape:
        """Return one token's work in an average layer computed in ``dtype``.

        ``shards`` divides query and output projections among CP ranks. If None, every rank stores all of them.
        ``experts`` divides experts among ranks. If None, every rank computes its own tokens' experts.
        """
        used = sum(layer.used for layer in self.layer_costs)
        groups, attention = self.kv_groups(dtype), self.attention.cost(self.hidden_size)
        return ModelShape(
            num_layers=self.num_layers,
            linear_flops=2 * used // self.num_layers,
            kv_flops=2 * self.layer_costs[0].kv,
            attention_flops=attention.forms[0].pair_flops,
            kv_row_bytes=sum(group.bytes_per_token for group in groups) // self.num_layers,
            q_row_bytes=attention.long_form.query_width * DTYPE_BYTES[dtype],
            partial_row_bytes=4 * attention.long_form.out_width,
            expand_flops=attention.expand_flops,
            stored_pair_flops=attention.forms[-1].pair_flops,
            windows=tuple(sorted((group.window, len(group.layers)) for group in groups if group.window)),
            top_k=attention.top_k,
            index_flops=sum(layer.index_flops for layer in self.layer_costs) // self.num_layers,
            index_row_bytes=attention.index_row_bytes,
            index_share=1 - sum(self.shares_selection) / self.num_layers,
            weight_bytes=self.received_bytes(dtype, shards),
            expert_flops=2 * sum(layer.routed for layer in self.layer_costs) // self.num_layers,
            expert_share=self.expert_share,
            experts=experts,
        )
