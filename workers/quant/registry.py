"""Supported formats of quantized checkpoints, by `quant_method`. Does not import torch."""

from collections.abc import Callable, Mapping
from typing import Any

from workers.quant import fp8_blocks
from workers.quant.interface import UnsupportedFormatError, WeightFormat
from workers.quant.plain import PlainFormat

FORMATS: Mapping[str, Callable[[Mapping[str, Any]], WeightFormat]] = {"fp8": fp8_blocks.read}
"""Readers of `quantization_config`. They raise UnsupportedFormatError."""
_KV_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")


def read_weight_format(given: Any) -> WeightFormat:
    """Return the format that a checkpoint's `quantization_config` describes: plain numbers if there is none.

    Raises UnsupportedFormatError for other formats, and for quantized KV.
    """
    if not given:
        return PlainFormat()
    if not isinstance(given, Mapping):
        raise UnsupportedFormatError(f"quantization_config is {given!r}; allowed: a mapping, or null")
    method = given.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        allowed = ", ".join(map(repr, FORMATS))
        message = f"quantization_config: quant_method is {method!r}; allowed: {allowed}, or an unquantized checkpoint"
        raise UnsupportedFormatError(message)
    for key in _KV_KEYS:
        if given.get(key) is not None:
            raise UnsupportedFormatError(
                f"quantization_config: {key} is {given[key]!r}; allowed: null, since KV has the model's dtype"
            )
    return FORMATS[method](given)
