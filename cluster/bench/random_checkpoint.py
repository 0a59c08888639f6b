"""A small checkpoint with random weights, for benchmarks of what does not depend on them. No torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

_SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
"""Of which any token's are on both of two EP ranks, whatever the weights are."""


def write_checkpoint(folder: Path, *, has_experts: bool) -> None:
    """A Qwen3 model, dense or with experts."""
    folder.mkdir()
    architecture = "Qwen3MoeForCausalLM" if has_experts else "Qwen3ForCausalLM"
    config = {"architectures": [architecture], **_SHAPE, **(_EXPERTS if has_experts else {})}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (_SHAPE["vocab_size"], _SHAPE["hidden_size"]),
        "model.norm.weight": (_SHAPE["hidden_size"],),
    }
    for layer in range(_SHAPE["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in _layer(has_experts).items()}
    tensors = {name: rng.normal(scale=0.05, size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")


def _layer(has_experts: bool) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = _SHAPE["hidden_size"], _SHAPE["head_dim"]
    q, kv = _SHAPE["num_attention_heads"] * head_dim, _SHAPE["num_key_value_heads"] * head_dim
    shapes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
    }
    if not has_experts:
        return shapes | _mlp("mlp", _SHAPE["intermediate_size"])
    shapes["mlp.gate"] = (_EXPERTS["num_experts"], hidden)
    for expert in range(_EXPERTS["num_experts"]):
        shapes |= _mlp(f"mlp.experts.{expert}", _EXPERTS["moe_intermediate_size"])
    return shapes


def _mlp(name: str, width: int) -> dict[str, tuple[int, ...]]:
    hidden = _SHAPE["hidden_size"]
    wide = {f"{name}.{part}_proj": (width, hidden) for part in ("gate", "up")}
    return wide | {f"{name}.down_proj": (hidden, width)}
