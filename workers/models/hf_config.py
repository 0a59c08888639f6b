"""A checkpoint's config.json, read field by field. Does not import torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from cluster.spec.errors import UserError
from workers.layers.config import RopeConfig, RopeType

Dtype = Literal["float32", "bfloat16", "float16"]
MOST_LAYERS = 4096
"""Most layers accepted; more is a damaged file, and would fill the memory of its reader."""
_NEEDED_KEYS: Mapping[RopeType, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


class UnsupportedModelError(UserError):
    """A checkpoint that this engine cannot run as its authors meant it; says what was found and what is allowed."""


@dataclass(frozen=True, slots=True)
class HfConfig:
    """The parsed files of a Hugging Face folder; a missing or malformed field is refused by name."""

    raw: Mapping[str, Any]
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Contents of generation_config.json."""

    @classmethod
    def from_folder(cls, folder: Path) -> "HfConfig":
        """Read a folder; raises UnsupportedModelError if it has no config.json, or one that is not a JSON object."""
        generation = folder / "generation_config.json"
        return cls(_read_json(folder / "config.json"), _read_json(generation) if generation.exists() else {})

    def get(self, key: str, default: Any = None) -> Any:
        return self.raw.get(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.raw.get(key, default))

    def positive(self, key: str, default: int | None = None) -> int:
        """Return a positive integer; null counts as missing."""
        value = self.raw.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedModelError(f"config.json must give {key} as a positive integer, but gives {value!r}")
        return value

    @property
    def num_layers(self) -> int:
        num_layers = self.positive("num_hidden_layers")
        if num_layers > MOST_LAYERS:
            raise UnsupportedModelError(f"num_hidden_layers is {num_layers}; allowed: at most {MOST_LAYERS}")
        return num_layers

    @property
    def dtype(self) -> Dtype:
        """Number format that the checkpoint was saved in."""
        known: tuple[Dtype, ...] = get_args(Dtype)
        name = str(self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32").removeprefix("torch.")
        for dtype in known:
            if name == dtype:
                return dtype
        raise UnsupportedModelError(f"dtype is {name!r}; allowed: {', '.join(known)}")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer; those of generation_config.json if it gives any."""
        return _token_ids(self.generation.get("eos_token_id")) or _token_ids(self.raw.get("eos_token_id"))


def _token_ids(given: Any) -> tuple[int, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list) else (given,)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UnsupportedModelError(f"{path.parent} is not a model folder: it has no {path.name}") from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{path} must hold a JSON object, but holds a {type(content).__name__}")
    return content


ROPE_TYPES: tuple[RopeType, ...] = get_args(RopeType)


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
