"""Number of tokens that a model supports, read from config.json. Imported by the router and by workers."""

from collections.abc import Mapping
from typing import Any


def model_context(config: Mapping[str, Any]) -> int | None:
    """Return the maximum number of prompt and output tokens together, or None if config.json does not say.

    With YaRN, this is the length to which the original context is stretched. `max_position_embeddings` can be shorter:
    Qwen's instructions for long texts only add `rope_scaling`.
    """
    longest: int | None = config.get("max_position_embeddings")
    match config.get("rope_scaling") or config.get("rope_parameters"):
        case {"factor": int() | float() as factor, "original_max_position_embeddings": int() as original, **others}:
            if others.get("rope_type", others.get("type")) == "yarn":
                return max(longest or 0, int(original * factor))
    return longest
