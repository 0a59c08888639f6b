"""Readers of a checkpoint's config.json, and of fields that model families share. Does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, get_args

from cluster.model_folder import read_json
from cluster.spec.context import model_context
from cluster.spec.errors import UserError
from cluster.spec.kv import FULL_ATTENTION, SLIDING_ATTENTION
from workers.layers.attention_config import AnyAttentionConfig, AttentionConfig
from workers.layers.config import FeedForwardConfig, MlpConfig, MoeConfig, RopeConfig, RopeType
from workers.models.interface import DecoderConfig, Dtype, UnsupportedModelError
from workers.quant.interface import UnsupportedFormatError, WeightFormat
from workers.quant.registry import read_weight_format

MOST_LAYERS = 4096
"""Maximum number of layers. A larger number means a damaged file and would fill the reader's memory."""
_MODELOPT_FILE = "hf_quant_config.json"
"""File in which ModelOpt describes a quantized checkpoint, sometimes without `quantization_config` in config.json."""
ROPE_TYPES: tuple[RopeType, ...] = get_args(RopeType)
_NEEDED_KEYS: Mapping[RopeType, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


@dataclass(frozen=True, slots=True)
class HfConfig:
    """Parsed config.json. A missing or malformed field raises an error that names the field."""

    raw: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        return self.raw.get(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.raw.get(key, default))

    def positive(self, key: str, default: int | None = None) -> int:
        """Return a positive integer. Null counts as missing."""
        value = self.raw.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedModelError(f"config.json must give {key} as a positive integer, but gives {value!r}")
        return value

    def count(self, key: str) -> int:
        """Return an integer of at least zero. Null counts as zero."""
        value = self.raw.get(key) or 0
        if not isinstance(value, int) or value < 0:
            raise UnsupportedModelError(f"config.json must give {key} as an integer of at least 0, but gives {value!r}")
        return value

    def number(self, key: str, default: float | None = None, above: float | None = None) -> float:
        """Return a finite number, which must be above ``above`` if it is given. Null counts as missing."""
        value: Any = self.raw.get(key)
        if value is None and default is not None:
            return default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
        if not is_number or (above is not None and value <= above):
            wanted = "a number" if above is None else f"a number above {above}"
            raise UnsupportedModelError(f"config.json must give {key} as {wanted}, but gives {value!r}")
        return float(value)

    def one_of(self, key: str, *allowed: object) -> object:
        """Return a value that must be among the allowed ones. A missing field is None."""
        if (value := self.raw.get(key)) not in allowed:
            words = " or ".join(repr(each) for each in allowed if each is not None)
            raise UnsupportedModelError(f"{key} is {value!r}; allowed: {words}")
        return value

    def by_layer(self, key: str, given: Any, *allowed: str) -> Sequence[str]:
        """Return a list of allowed words, one for each layer. ``key`` names the field that gives it."""
        if not isinstance(given, list):
            raise UnsupportedModelError(f"{key} is {given!r}; allowed: a list of {' or '.join(allowed)}")
        if len(given) != self.num_layers:
            expected = f"{self.num_layers}, one for each layer"
            raise UnsupportedModelError(f"{key} has {len(given)} entries; allowed: {expected}")
        if unknown := sorted(set(map(str, given)) - set(allowed)):
            raise UnsupportedModelError(f"{key} has {', '.join(unknown)}; allowed: {' or '.join(allowed)}")
        return list[str](given)

    @property
    def num_layers(self) -> int:
        num_layers = self.positive("num_hidden_layers")
        if num_layers > MOST_LAYERS:
            raise UnsupportedModelError(f"num_hidden_layers is {num_layers}; allowed: at most {MOST_LAYERS}")
        return num_layers

    @property
    def dtype(self) -> Dtype:
        known: tuple[Dtype, ...] = get_args(Dtype)
        name = str(self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32").removeprefix("torch.")
        for dtype in known:
            if name == dtype:
                return dtype
        raise UnsupportedModelError(f"dtype is {name!r}; allowed: {', '.join(known)}")

    @property
    def weight_format(self) -> WeightFormat:
        """Return the format of stored weights. Raises UnsupportedModelError."""
        try:
            return read_weight_format(self.raw.get("quantization_config"))
        except UnsupportedFormatError as error:
            raise UnsupportedModelError(str(error)) from error


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return a folder's config.json. Raises UnsupportedModelError if it is missing or not a JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        raise UnsupportedModelError(f"{folder} is not a model folder: it has no {path.name}")
    try:
        content = read_json(path)
    except UserError as error:
        raise UnsupportedModelError(str(error)) from error
    if (folder / _MODELOPT_FILE).exists() and not content.get("quantization_config"):
        content["quantization_config"] = {"quant_method": "modelopt"}
    return content


def read_rope_config(raw: Mapping[str, Any], max_position_embeddings: int, rotated_share: float = 1.0) -> RopeConfig:
    """Read `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

    Raises UnsupportedModelError for an unknown type, settings by layer type, a missing key, or another share of a head
    than the one that the family rotates.
    """
    settings = _given_settings(raw)
    if (share := _given_share(raw)) != rotated_share:
        raise UnsupportedModelError(f"partial_rotary_factor is {share!r}; allowed: {rotated_share}")
    given = {key: value for key, value in settings.items() if value is not None}
    rope_type = _checked_type(given)
    original_key = "original_max_position_embeddings"
    outer = {key: raw[key] for key in (original_key, "rope_theta") if raw.get(key)}
    original_len = int(HfConfig({**given, **outer}).number(original_key, max_position_embeddings, above=0))
    factor = max_position_embeddings / original_len if rope_type == "yarn" else 1.0
    rope, nonzero = HfConfig(given), HfConfig({key: value for key, value in given.items() if value})
    return RopeConfig(
        rope_type=rope_type,
        theta=HfConfig({**outer, **given}).number("rope_theta", 10_000.0, above=1),
        max_position_embeddings=max_position_embeddings,
        original_max_position_embeddings=original_len,
        factor=rope.number("factor", factor, above=0),
        low_freq_factor=rope.number("low_freq_factor", 1.0, above=0),
        high_freq_factor=rope.number("high_freq_factor", 4.0, above=0),
        attention_factor=rope.number("attention_factor", 0.0, above=0) or None,
        # transformers takes zeros for missing values.
        beta_fast=nonzero.number("beta_fast", 32.0, above=0),
        beta_slow=nonzero.number("beta_slow", 1.0, above=0),
        mscale=nonzero.number("mscale", 0.0, above=0) or None,
        mscale_all_dim=nonzero.number("mscale_all_dim", 0.0, above=0) or None,
        # Unlike other keys, null does not count as missing.
        truncate=bool(settings.get("truncate", True)),
    )


def _given_settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError(
            f"rope_parameters must be one flat mapping for all layers, but config.json gives {given!r}"
        )
    return given


def _given_share(raw: Mapping[str, Any]) -> Any:
    key = "partial_rotary_factor"
    share = _given_settings(raw).get(key, raw.get(key))
    return 1.0 if share is None else share


def _checked_type(given: Mapping[str, Any]) -> RopeType:
    name = given.get("rope_type", given.get("type", "default"))
    for rope_type in ROPE_TYPES:
        if name == rope_type:
            missing = [key for key in _NEEDED_KEYS[rope_type] if key not in given]
            if missing:
                raise UnsupportedModelError(f"rope type {name!r} needs {', '.join(missing)}, which config.json lacks")
            return rope_type
    raise UnsupportedModelError(f"rope type {name!r} is not supported; allowed: {', '.join(ROPE_TYPES)}")


def read_decoder(
    hf: HfConfig,
    attention: AnyAttentionConfig,
    feed_forward: Sequence[FeedForwardConfig],
    windows: Sequence[int | None] | None = None,
    renamed: Mapping[str, str] | None = None,
    num_draft_layers: int = 0,
) -> DecoderConfig:
    """Read the fields that all families have in common."""
    _refuse_unsupported(hf)
    max_len = hf.positive("max_position_embeddings")
    return DecoderConfig(
        vocab_size=hf.positive("vocab_size"),
        hidden_size=hf.positive("hidden_size"),
        attention=attention,
        feed_forward=tuple(feed_forward),
        windows=tuple(windows or [None] * len(feed_forward)),
        shares_selection=(False,) * len(feed_forward),
        rms_norm_eps=hf.number("rms_norm_eps"),
        rope=read_rope_config(hf.raw, max_len, attention.rotated_share),
        max_position_embeddings=model_context(hf.raw) or max_len,
        tie_word_embeddings=hf.flag("tie_word_embeddings"),
        dtype=hf.dtype,
        renamed=renamed or {},
        num_draft_layers=num_draft_layers,
        weight_format=hf.weight_format,
    )


def read_partial_attention(hf: HfConfig, **flags: bool) -> AttentionConfig:
    """Read attention that rotates only a part of each head."""
    share, attention = _given_share(hf.raw), read_attention(hf, **flags)
    if not isinstance(share, (int, float)) or not 0 < share <= 1 or attention.head_dim * share % 2:
        allowed = f"a share of head_dim = {attention.head_dim} that is an even number of elements"
        raise UnsupportedModelError(f"partial_rotary_factor is {share!r}; allowed: {allowed}")
    return replace(attention, rotated_share=share)


def read_attention(hf: HfConfig, **flags: bool) -> AttentionConfig:
    """Read the number and size of heads."""
    num_heads = hf.positive("num_attention_heads")
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=hf.positive("num_key_value_heads", num_heads),
        head_dim=hf.positive("head_dim", hf.positive("hidden_size") // num_heads),
        **flags,
    )


def read_experts(hf: HfConfig, *, renormalize: bool, intermediate_size: str, shared_size: int = 0) -> MoeConfig:
    """Read the number and size of experts. ``intermediate_size`` is the key of the experts' width."""
    num_experts = hf.positive("num_local_experts" if "num_local_experts" in hf.raw else "num_experts")
    top_k = hf.positive("num_experts_per_tok")
    if top_k > num_experts:
        raise UnsupportedModelError(f"num_experts_per_tok is {top_k}; allowed: at most {num_experts}")
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=hf.positive(intermediate_size),
        renormalize=renormalize,
        shared_size=shared_size,
    )


def sparse_layers(hf: HfConfig, moe: MoeConfig) -> list[FeedForwardConfig]:
    """Return each layer's feed-forward part: experts, or an MLP where a Qwen checkpoint has one."""
    every, dense = hf.positive("decoder_sparse_step", 1), set(hf.get("mlp_only_layers") or ())
    mlp = MlpConfig(intermediate_size=hf.positive("intermediate_size"))
    return [mlp if (layer + 1) % every or layer in dense else moe for layer in range(hf.num_layers)]


def every_layers_window(hf: HfConfig) -> list[int | None]:
    """Return the window of every layer if all have one. None if `sliding_window` is null."""
    return [given_window(hf)] * hf.num_layers


def given_window(hf: HfConfig) -> int | None:
    return None if hf.get("sliding_window") is None else hf.positive("sliding_window")


def windows_of_types(hf: HfConfig, layer_types: Any, window: int | None) -> list[int | None]:
    """Return each layer's window, which layers of the sliding type have."""
    types = hf.by_layer("layer_types", layer_types, FULL_ATTENTION, SLIDING_ATTENTION)
    return [window if each == SLIDING_ATTENTION else None for each in types]


def windows_by_type(hf: HfConfig, has_window: Sequence[bool]) -> list[int | None]:
    """Return each layer's window in a Qwen model. Without `layer_types`, ``has_window`` says which layers have one."""
    given = hf.get("layer_types") or [SLIDING_ATTENTION if each else FULL_ATTENTION for each in has_window]
    return windows_of_types(hf, given, hf.positive("sliding_window") if uses_windows(hf) else None)


def last_layers_windows(hf: HfConfig) -> list[int | None]:
    """Return each layer's window in a dense Qwen model, where the layers from `max_window_layers` on have one."""
    return windows_by_type(hf, [layer >= hf.get("max_window_layers") for layer in range(hf.num_layers)])


def uses_windows(hf: HfConfig) -> bool:
    """Return whether a Qwen checkpoint uses windows."""
    return hf.flag("use_sliding_window") and hf.get("sliding_window") is not None


def _refuse_unsupported(hf: HfConfig) -> None:
    if not hf.flag("is_causal", True):
        # transformers lets tokens of such a decoder, mostly one for embeddings, see later ones.
        raise UnsupportedModelError(f"is_causal is {hf.get('is_causal')!r}; allowed: True")
    activation = hf.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act is {activation!r}; allowed: 'silu'")
