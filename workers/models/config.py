"""The shape of a model, read from a Hugging Face folder. Plain data: no torch, no weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from cluster.spec.config import ParallelConfig
from cluster.spec.cuts import Divisible, cut_problems
from workers.models.rope_config import RopeConfig, UnsupportedModelError, read_rope_config

Architecture = Literal[
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"
]
Dtype = Literal["float32", "bfloat16", "float16"]
_WITH_QK_NORM: tuple[Architecture, ...] = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a checkpoint calls the parts of a mixture-of-experts layer."""

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Layers in which each token has a few of many MLPs."""

    num_experts: int
    num_chosen: int
    """Of each token."""
    intermediate_size: int
    """Width of one expert."""
    sum_to_one: bool
    """Whether the weights of the chosen experts are scaled to a sum of 1."""
    dense_layers: frozenset[int]
    """Those that have one MLP all the same."""
    names: ExpertNames


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of one of the known families; they differ only by the flags below."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Whether the projection out of attention has a bias."""
    mlp_bias: bool
    qk_norm: bool
    """Whether queries and keys are normalised a head before they are rotated."""
    moe: MoeConfig | None = None
    """What its layers have instead of one MLP; None in dense models."""
    dtype: Dtype
    """The number format the checkpoint was saved in."""
    eos_token_ids: tuple[int, ...]
    """Any of these ends an answer; empty where the checkpoint names none."""

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read config.json and, for the end tokens, generation_config.json.

        Raises UnsupportedModelError when the model is not one this engine can run, or has no config.json.
        """
        raw = _read_json(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.exists() else {}
        try:
            return cls.from_mapping(raw, generation)
        except UnsupportedModelError:
            raise
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UnsupportedModelError(f"{folder}: config.json holds a value of a wrong kind: {error}") from error

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> "ModelConfig":
        """As `from_folder`, from the two files' parsed contents."""
        architecture = _checked_architecture(raw)
        _refuse_unsupported(raw, architecture)
        hidden_size, num_heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
        max_len = _positive(raw, "max_position_embeddings")
        config = cls(
            architecture=architecture,
            vocab_size=_positive(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(raw, "intermediate_size"),
            num_layers=_positive(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_positive(raw, "num_key_value_heads", num_heads),
            head_dim=_positive(raw, "head_dim", _default_head_dim(architecture, hidden_size, num_heads)),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=max_len,
            rope=read_rope_config(raw, max_len),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "Qwen2ForCausalLM" or bool(raw.get("attention_bias", False)),
            output_bias=architecture != "Qwen2ForCausalLM" and bool(raw.get("attention_bias", False)),
            mlp_bias=architecture == "LlamaForCausalLM" and bool(raw.get("mlp_bias", False)),
            qk_norm=architecture in _WITH_QK_NORM,
            moe=_read_moe(raw, architecture),
            dtype=_read_dtype(raw),
            eos_token_ids=_eos_token_ids(generation) or _eos_token_ids(raw),
        )
        config._check_heads()
        return config

    def moe_of(self, layer: int) -> MoeConfig | None:
        """The experts of a layer, if it has any."""
        return self.moe if self.moe is not None and layer not in self.moe.dense_layers else None

    def of_rank(self, tp_size: int) -> "ModelConfig":
        """The shape of what one TP rank computes: fewer heads and a narrower MLP, everything else is whole.

        Raises UnsupportedModelError when so many ranks cannot share the heads.
        """
        if self.num_heads % tp_size:
            raise UnsupportedModelError(f"tp is {tp_size}; allowed: a divisor of the model's {self.num_heads} heads")
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            raise UnsupportedModelError(
                f"tp is {tp_size}; allowed: a divisor or a multiple of the model's {self.num_kv_heads} KV heads"
            )
        return replace(
            self,
            num_heads=self.num_heads // tp_size,
            num_kv_heads=max(1, self.num_kv_heads // tp_size),
            intermediate_size=-(-self.intermediate_size // tp_size),
            moe=self.moe and replace(self.moe, intermediate_size=-(-self.moe.intermediate_size // tp_size)),
        )

    def check_cut(self, parallel: ParallelConfig, path: str = "parallel") -> None:
        """Raises UnsupportedModelError when the ranks cannot share heads, layers or experts."""
        model = Divisible(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            num_layers=self.num_layers,
            num_experts=self.moe.num_experts if self.moe else None,
        )
        if problems := cut_problems(parallel, path, model):
            raise UnsupportedModelError("; ".join(map(str, problems)))

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads ({self.num_heads}) is no multiple of num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim must be even for rotary positions, but is {self.head_dim}")


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UnsupportedModelError(f"{path.parent} is no model folder: it has no {path.name}") from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{path} must hold a JSON object, but holds a {type(content).__name__}")
    return content


def _checked_architecture(raw: Mapping[str, Any]) -> Architecture:
    known: tuple[Architecture, ...] = get_args(Architecture)
    given = raw.get("architectures") or []
    for architecture in known:
        if list(given) == [architecture]:
            return architecture
    raise UnsupportedModelError(f"architectures is {given!r}; allowed is one of {', '.join(known)}")


def _refuse_unsupported(raw: Mapping[str, Any], architecture: Architecture) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        raise UnsupportedModelError(f"the checkpoint is quantized ({method}); allowed are float32, bfloat16, float16")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act is {activation!r}; allowed is 'silu'")
    if architecture != "LlamaForCausalLM" and _uses_sliding_window(raw, architecture):
        raise UnsupportedModelError("the model uses sliding-window attention; only full attention is supported")


def _read_moe(raw: Mapping[str, Any], architecture: Architecture) -> MoeConfig | None:
    if architecture == "Qwen3MoeForCausalLM":
        every, dense = _positive(raw, "decoder_sparse_step", 1), set(raw.get("mlp_only_layers") or ())
        num_layers = _positive(raw, "num_hidden_layers")
        moe = MoeConfig(
            num_experts=_positive(raw, "num_experts" if "num_experts" in raw else "num_local_experts"),
            num_chosen=_positive(raw, "num_experts_per_tok"),
            intermediate_size=_positive(raw, "moe_intermediate_size"),
            sum_to_one=bool(raw.get("norm_topk_prob", False)),
            dense_layers=frozenset(layer for layer in range(num_layers) if (layer + 1) % every or layer in dense),
            names=ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
        )
    elif architecture == "MixtralForCausalLM":
        moe = MoeConfig(
            num_experts=_positive(raw, "num_local_experts"),
            num_chosen=_positive(raw, "num_experts_per_tok"),
            intermediate_size=_positive(raw, "intermediate_size"),
            sum_to_one=True,
            dense_layers=frozenset(),
            names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
        )
    else:
        return None
    if moe.num_chosen > moe.num_experts:
        raise UnsupportedModelError(f"num_experts_per_tok is {moe.num_chosen}; allowed: at most {moe.num_experts}")
    return moe


def _uses_sliding_window(raw: Mapping[str, Any], architecture: Architecture) -> bool:
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        return any(layer_type != "full_attention" for layer_type in layer_types)
    if architecture == "MixtralForCausalLM":
        return raw.get("sliding_window") is not None
    first_windowed = raw.get("max_window_layers", 28)
    in_use = bool(raw.get("use_sliding_window", False)) and raw.get("sliding_window", 4096) is not None
    return in_use and first_windowed < _positive(raw, "num_hidden_layers")


def _default_head_dim(architecture: Architecture, hidden_size: int, num_heads: int) -> int:
    """Dense Qwen3 separates head size from hidden size and leaves 128 unsaid."""
    return 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads


def _positive(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"config.json must give {key} as a positive integer, but gives {value!r}")
    return value


def _read_dtype(raw: Mapping[str, Any]) -> Dtype:
    known: tuple[Dtype, ...] = get_args(Dtype)
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    for dtype in known:
        if name == dtype:
            return dtype
    raise UnsupportedModelError(f"dtype is {name!r}; allowed: {', '.join(known)}")


def _eos_token_ids(raw: Mapping[str, Any]) -> tuple[int, ...]:
    given = raw.get("eos_token_id")
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list) else (given,)
