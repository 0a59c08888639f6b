"""How positions are encoded, as Hugging Face configs describe it. The arithmetic is in workers.layers.rotary."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from cluster.spec.errors import UserError

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_TYPES: tuple[RopeType, ...] = get_args(RopeType)

_NEEDED_KEYS: Mapping[RopeType, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


class UnsupportedModelError(UserError):
    """A checkpoint this engine cannot run as its authors meant it; says what was found and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. A field that the type does not use keeps its default."""

    rope_type: RopeType
    theta: float
    """The base: frequency i of d/2 is theta ** (-2i/d) before scaling."""
    max_position_embeddings: int
    """The length (tokens) beyond which `dynamic` starts to scale."""
    original_max_position_embeddings: int
    """The length (tokens) seen in pre-training, for `llama3` and `yarn`."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    """Given scale of cos and sin for `yarn`; None: derived from factor, mscale and mscale_all_dim."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def read_rope_config(raw: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """Rotary settings of a parsed config.json; new form `rope_parameters`, old form `rope_theta` and `rope_scaling`.

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
        raise UnsupportedModelError(f"partial_rotary_factor is {partial!r}; only whole heads (1.0) are rotated")
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
