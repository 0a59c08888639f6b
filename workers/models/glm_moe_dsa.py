"""GLM-5: DeepSeek-V3.2's layers, of which some use the keys that a layer before them has selected.

See arXiv:2603.12201.
"""

from typing import Any

from workers.models.deepseek import V32_DEFAULTS, read_indexed
from workers.models.hf_config import HfConfig
from workers.models.interface import DecoderConfig, UnsupportedModelError

DEFAULTS: dict[str, Any] = {
    **V32_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
}
_LETTERS = {"F": "full", "S": "shared"}


def read(hf: HfConfig) -> DecoderConfig:
    hf.one_of("indexer_rope_interleave", True, None)
    types = hf.by_layer("indexer_types", _indexer_types(hf), "full", "shared")
    if types[0] != "full":
        raise UnsupportedModelError(f"indexer_types begins with {types[0]}; allowed: full")
    return read_indexed(hf, interleaves_index=True, shares_selection=[each == "shared" for each in types])


def _indexer_types(hf: HfConfig) -> Any:
    """Return the kind of indexer in each layer: given by name, by letter, or by the distance between full ones."""
    if (types := hf.get("indexer_types")) is not None:
        return types
    if (pattern := hf.get("index_topk_pattern")) is not None:
        return [_LETTERS.get(each, each) for each in pattern] if isinstance(pattern, str) else pattern
    every = hf.positive("index_topk_freq", 1)
    offset = 2 if hf.get("index_skip_topk_offset") is None else hf.count("index_skip_topk_offset")
    return ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(hf.num_layers)]
