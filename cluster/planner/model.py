"""What the planner knows of the served model, read without torch and without the network."""

from dataclasses import dataclass
from pathlib import Path

from cluster.spec.config import DeployConfig
from cluster.spec.cuts import Divisible
from cluster.spec.errors import ConfigError, Problem, UserError
from cluster.spec.kv import KvGeometry, key_value_group
from workers.models import recall_weights
from workers.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCounts:
    """Numbers that a model keeps, and how wide what it computes is."""

    a_table: int = 0
    """Of the embedding, or of the way back."""
    is_tied: bool = False
    """Whether the two are the same."""
    queries_a_layer: int = 0
    """Of the projections to queries and out of attention."""
    kv_a_layer: int = 0
    """Of those to keys and values."""
    mlp_a_layer: int = 0
    """Where a layer has no experts."""
    experts_a_layer: int = 0
    """Where it has."""
    expert_layers: frozenset[int] = frozenset()
    """Those that have experts in place of one MLP."""
    hidden: int = 0
    heads_width: int = 0
    """Of all projections of a token in attention."""
    mlp_width: int = 0
    """Of those in an MLP, or in a token's experts."""
    answers_width: int = 0
    """Of what a token's experts answer, each for itself."""
    vocab: int = 0

    @classmethod
    def of(cls, shape: ModelConfig) -> "WeightCounts":
        """Norms, biases and what chooses experts, which are next to nothing, are left out."""
        hidden, moe = shape.hidden_size, shape.moe
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        inner = moe.intermediate_size * moe.num_chosen if moe else shape.intermediate_size
        return cls(
            a_table=shape.vocab_size * hidden,
            is_tied=shape.tie_word_embeddings,
            queries_a_layer=2 * hidden * q_size,
            kv_a_layer=2 * hidden * kv_size,
            mlp_a_layer=3 * hidden * shape.intermediate_size,
            experts_a_layer=3 * hidden * moe.intermediate_size * moe.num_experts if moe else 0,
            expert_layers=frozenset(range(shape.num_layers)) - moe.dense_layers if moe else frozenset(),
            hidden=hidden,
            heads_width=2 * q_size + 2 * kv_size,
            mlp_width=3 * inner,
            answers_width=moe.num_chosen * hidden if moe else 0,
            vocab=shape.vocab_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as far as memory and placement care."""

    geometry: KvGeometry
    dtype: str
    """Dtype of weights and activations."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    max_context: int
    """Most tokens the model itself takes, prompt and answer together."""
    num_experts: int | None = None
    """Of each layer; None in dense models."""
    weights: WeightCounts = WeightCounts()

    @property
    def divisible(self) -> Divisible:
        """What of it ranks share."""
        return Divisible(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            num_layers=self.geometry.num_layers,
            num_experts=self.num_experts,
        )


@dataclass(frozen=True, slots=True)
class UnknownModel:
    """A model whose shape cannot be told here and now."""

    reason: str


def longest_context(config: DeployConfig, model: ModelFacts) -> int:
    """Most tokens of one request, prompt and answer together."""
    return config.model.max_context or model.max_context


def read_model(config: DeployConfig) -> ModelFacts | UnknownModel:
    """The served model: a built-in one, a local folder, or what the Hugging Face cache of this machine holds.

    Raises:
        ConfigError: ``model.path`` means a local folder, and there is none.
    """
    if config.model.path in recall_weights.BUILT_IN:
        shape = recall_weights.config(has_experts=recall_weights.BUILT_IN[config.model.path])
        return _facts(config, ModelConfig.from_mapping(shape, {}))
    folder = _find_folder(config.model.path)
    if folder is None:
        name = config.model.path
        mend = f"`hf download {name} config.json` fetches all that is needed"
        return UnknownModel(f"{name} is not in this machine's Hugging Face cache yet; {mend}")
    try:
        return facts_of(config, folder)
    except UserError as exc:
        return UnknownModel(str(exc))


def facts_of(config: DeployConfig, folder: Path) -> ModelFacts:
    """The model of a folder.

    Raises:
        UserError: the engine cannot run it.
    """
    return _facts(config, ModelConfig.from_folder(folder))


def _facts(config: DeployConfig, shape: ModelConfig) -> ModelFacts:
    dtype = shape.dtype if config.model.dtype == "auto" else config.model.dtype
    geometry = KvGeometry(
        model=config.model.name,
        num_layers=shape.num_layers,
        groups=(key_value_group(range(shape.num_layers), shape.num_kv_heads, shape.head_dim, dtype),),
        page_size=config.kv.page_size,
    )
    return ModelFacts(
        geometry=geometry,
        dtype=dtype,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_experts=shape.moe.num_experts if shape.moe else None,
        max_context=shape.max_position_embeddings,
        weights=WeightCounts.of(shape),
    )


def _find_folder(path: str) -> Path | None:
    """The local folder that a model path means; None for a repository that was not fetched yet."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        message = (
            f"got {path!r}, and there is no such folder; "
            f"allowed: {', '.join(recall_weights.BUILT_IN)}, a local folder, a Hugging Face repository"
        )
        raise ConfigError([Problem("model.path", message)])
    # Importing it takes longer than the rest of the command.
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, "config.json")
    return Path(found).parent if isinstance(found, str) else None
