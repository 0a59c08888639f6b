"""Rotary settings of a config.json. The arithmetic is in workers.layers.rotary."""

from collections.abc import Mapping
from typing import Any, get_args

from workers.layers.config import RopeConfig, RopeType
from workers.models.hf_config import UnsupportedModelError

ROPE_TYPES: tuple[RopeType, ...] = get_args(RopeType)

_NEEDED_KEYS: Mapping[RopeType, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


def read_rope_config(raw: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """Read the new form, `rope_parameters`, or the old one, `rope_theta` and `rope_scaling`.

    Raises UnsupportedModelError for an unknown type, a partial rotation, settings by layer type, or a missing key.
    """
    given = {key: value for key, value in _given_settings(raw).items() if value is not None}
    rope_type = _checked_type(given)
    original_len = raw.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    original_len = int(original_len or max_position_embeddings)
    factor = given.get("factor", max_position_embeddings / original_len if rope_type == "yarn" else 1.0)
    return RopeConfig(
        rope_type=rope_type,
        theta=float(given.get("rope_theta", raw.get("rope_theta") or 10_000.0)),
        max_position_embeddings=max_position_embeddings,
        original_max_position_embeddings=original_len,
        factor=float(factor),
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)),
        attention_factor=given.get("attention_factor"),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        mscale=given.get("mscale"),
        mscale_all_dim=given.get("mscale_all_dim"),
        truncate=bool(given.get("truncate", True)),
    )


def _given_settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError(
            f"rope_parameters must be one flat mapping for all layers, but config.json gives {given!r}"
        )
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor is {partial!r}; allowed is 1.0")
    return given


def _checked_type(given: Mapping[str, Any]) -> RopeType:
    name = given.get("rope_type", given.get("type", "default"))
    for rope_type in ROPE_TYPES:
        if name == rope_type:
            missing = [key for key in _NEEDED_KEYS[rope_type] if key not in given]
            if missing:
                raise UnsupportedModelError(f"rope type {name!r} needs {', '.join(missing)}, which config.json lacks")
            return rope_type
    raise UnsupportedModelError(f"rope type {name!r} is not supported; allowed: {', '.join(ROPE_TYPES)}")
