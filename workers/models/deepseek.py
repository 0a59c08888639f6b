"""DeepSeek-V2, DeepSeek-V3, DeepSeek-V3.2 and Kimi-K2: latent attention, a few dense layers, then experts chosen in
groups. V3.2 adds an indexer in every layer.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from workers.layers.attention_config import AnyAttentionConfig, IndexerConfig, LatentAttentionConfig
from workers.layers.config import ExpertRouterConfig, FeedForwardConfig, MlpConfig, MoeConfig
from workers.models.hf_config import HfConfig, read_decoder
from workers.models.interface import DecoderConfig, UnsupportedModelError

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
V2_DEFAULTS: dict[str, Any] = {
    **_DEFAULTS,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
}
V3_DEFAULTS: dict[str, Any] = {
    **_DEFAULTS,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "num_nextn_predict_layers": 1,
}


V32_DEFAULTS: dict[str, Any] = {**V3_DEFAULTS, "index_n_heads": 64, "index_head_dim": 128}


def read_v2(hf: HfConfig) -> DecoderConfig:
    method = hf.one_of("topk_method", "greedy", "group_limited_greedy")
    hf.one_of("scoring_func", "softmax", None)
    hf.one_of("norm_topk_prob", False, None)
    hf.one_of("mlp_bias", False, None)
    num_groups, top_groups = (1, 1) if method == "greedy" else (hf.positive("n_group"), hf.positive("topk_group"))
    scale = hf.number("routed_scaling_factor")
    router = ExpertRouterConfig(is_fp32=True, num_groups=num_groups, top_groups=top_groups, scale=scale)
    return read_layers(hf, _read_attention(hf, is_interleaved=True), router)


def read_v3(hf: HfConfig, are_sparse: Sequence[bool] | None = None) -> DecoderConfig:
    """Read a model with V3's attention and experts. ``are_sparse`` is as in ``read_layers``."""
    attention = _read_attention(hf, is_interleaved=hf.flag("rope_interleave"))
    return read_layers(hf, attention, v3_router(hf), are_sparse)


def read_v32(hf: HfConfig) -> DecoderConfig:
    hf.one_of("indexer_rope_interleave", False, None)
    return read_indexed(hf, interleaves_index=False)


def read_indexed(
    hf: HfConfig, *, interleaves_index: bool, shares_selection: Sequence[bool] | None = None
) -> DecoderConfig:
    """Read a model with V3's attention and experts, and indexers in the layers that do not share a selection."""
    hf.one_of("rope_interleave", True, None)
    hf.one_of("moe_layer_freq", 1, None)
    hf.one_of("mlp_bias", False, None)
    hf.positive("q_lora_rank")
    attention = _read_attention(hf, is_interleaved=True)
    config = read_layers(hf, attention, v3_router(hf), sparse_flags(hf))
    indexer = IndexerConfig(
        num_heads=hf.positive("index_n_heads"),
        head_dim=hf.positive("index_head_dim"),
        top_k=hf.positive("index_topk"),
        is_interleaved=interleaves_index,
    )
    if indexer.head_dim < (least := attention.rope_dim):
        raise UnsupportedModelError(
            f"index_head_dim is {indexer.head_dim}; allowed: at least qk_rope_head_dim = {least}"
        )
    shares = tuple(shares_selection or config.shares_selection)
    return replace(config, attention=replace(attention, indexer=indexer), shares_selection=shares)


def sparse_flags(hf: HfConfig) -> Sequence[bool] | None:
    """Return which layers have experts. None if config.json does not list them."""
    if (kinds := hf.get("mlp_layer_types")) is None:
        return None
    return [kind == "sparse" for kind in hf.by_layer("mlp_layer_types", kinds, "dense", "sparse")]


def v3_router(hf: HfConfig) -> ExpertRouterConfig:
    """Read a router that scores experts by a sigmoid, and chooses them with a bias and in groups."""
    hf.one_of("topk_method", "noaux_tc", None)
    hf.one_of("scoring_func", "sigmoid", None)
    return ExpertRouterConfig(
        scores="sigmoid",
        is_fp32=True,
        has_bias=True,
        num_groups=hf.positive("n_group"),
        top_groups=hf.positive("topk_group"),
        num_best=2,
        scale=hf.number("routed_scaling_factor"),
    )


def read_layers(
    hf: HfConfig, attention: AnyAttentionConfig, router: ExpertRouterConfig, are_sparse: Sequence[bool] | None = None
) -> DecoderConfig:
    """Read a model whose experts are DeepSeek's. ``are_sparse`` says which layers have them. If it is None, config.json
    says how many of the first have none.
    """
    moe = _read_experts(hf, router)
    mlp = MlpConfig(intermediate_size=hf.positive("intermediate_size"))
    num_dense, every = hf.count("first_k_dense_replace"), hf.positive("moe_layer_freq", 1)
    if are_sparse is None:
        are_sparse = [layer >= num_dense and layer % every == 0 for layer in range(hf.num_layers)]
    layers: list[FeedForwardConfig] = [moe if is_sparse else mlp for is_sparse in are_sparse]
    return read_decoder(
        hf,
        attention,
        layers,
        renamed={"shared_expert": "shared_experts"},
        num_draft_layers=hf.count("num_nextn_predict_layers"),
    )


def _read_attention(hf: HfConfig, *, is_interleaved: bool) -> LatentAttentionConfig:
    query_rank = None if hf.get("q_lora_rank") is None else hf.positive("q_lora_rank")
    bias = hf.flag("attention_bias")
    if bias and query_rank is None:
        raise UnsupportedModelError("attention_bias is true with a null q_lora_rank; allowed: false, or a rank")
    if (rope_dim := hf.positive("qk_rope_head_dim")) % 2:
        raise UnsupportedModelError(f"qk_rope_head_dim is {rope_dim}; allowed: even numbers")
    return LatentAttentionConfig(
        num_heads=hf.positive("num_attention_heads"),
        query_rank=query_rank,
        kv_rank=hf.positive("kv_lora_rank"),
        plain_dim=hf.positive("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=hf.positive("v_head_dim"),
        is_interleaved=is_interleaved,
        bias=bias,
    )


def _read_experts(hf: HfConfig, router: ExpertRouterConfig) -> MoeConfig:
    num_experts, top_k = hf.positive("n_routed_experts"), hf.positive("num_experts_per_tok")
    group_size, rest = divmod(num_experts, router.num_groups)
    if rest or group_size < router.num_best:
        raise UnsupportedModelError(
            f"n_group is {router.num_groups}; allowed: a divisor of n_routed_experts = {num_experts} "
            f"with at least {router.num_best} experts per group"
        )
    if router.top_groups > router.num_groups:
        raise UnsupportedModelError(
            f"topk_group is {router.top_groups}; allowed: at most n_group = {router.num_groups}"
        )
    if top_k > (most := router.top_groups * group_size):
        where = f"in {router.top_groups} groups (topk_group)"
        raise UnsupportedModelError(f"num_experts_per_tok is {top_k}; allowed: at most {most} {where}")
    width = hf.positive("moe_intermediate_size")
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=width,
        renormalize=hf.flag("norm_topk_prob"),
        shared_size=width * hf.count("n_shared_experts"),
        has_shared_gate=False,
        router=router,
    )
