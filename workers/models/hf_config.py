"""A checkpoint's config.json, read field by field. Loads no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from cluster.spec.errors import UserError

Dtype = Literal["float32", "bfloat16", "float16"]
MOST_LAYERS = 4096
"""Most layers accepted; more is a damaged file, and would fill the memory of its reader."""


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
        """Return the value as it was parsed."""
        return self.raw.get(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a switch."""
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
        """Decoder layers."""
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
