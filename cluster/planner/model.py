"""Facts about the served model that planning needs, read without torch and without the network."""

from dataclasses import dataclass
from pathlib import Path

from cluster.spec.config import DeployConfig, Device
from cluster.spec.errors import ConfigError, Problem, UserError
from cluster.spec.kv import KvGeometry
from workers.context_parallel.cost_model import ModelShape
from workers.models import recall_weights
from workers.models.interface import DecoderConfig
from workers.models.registry import parse_model_config, read_model_config
from workers.models.resolve import local_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Model configuration, with the KV format of this deployment."""

    config: DecoderConfig
    geometry: KvGeometry
    dtype: str


@dataclass(frozen=True, slots=True)
class UnknownModel:
    """Model whose configuration cannot be read on this machine."""

    reason: str


def read_model(config: DeployConfig) -> ModelFacts | UnknownModel:
    """Read the served model: a built-in one, a local folder, or one in the Hugging Face cache of this machine.

    Raises:
        ConfigError: ``model.path`` names a local folder that does not exist, or cannot be the name of a repository.
    """
    if config.model.path in recall_weights.BUILT_IN:
        shape = recall_weights.config(recall_weights.Variant(config.model.path))
        return _facts(config, parse_model_config(shape))
    folder = local_folder(config.model.path) or _cached(config.model.path)
    if folder is None:
        name = config.model.path
        fix = f"`hf download {name} config.json` fetches all that is needed"
        return UnknownModel(f"{name} is not in this machine's Hugging Face cache yet; {fix}")
    try:
        return facts_of(config, folder)
    except UserError as exc:
        return UnknownModel(str(exc))


def facts_of(config: DeployConfig, folder: Path) -> ModelFacts:
    """Read a model folder. Raises UserError if the engine cannot run the model."""
    return _facts(config, read_model_config(folder))


def prefill_shape(config: DeployConfig, model: ModelFacts, layers: range) -> ModelShape:
    """Return a prefill worker's share of the work of some layers."""
    prefill, resources = config.prefill, config.resources
    experts = model.config.expert_exchange(
        prefill.parallel,
        model.dtype,
        resources.moe_dispatch,
        waits_for_counts=resources.device is Device.CUDA,
        in_background=config.collectives_in_background,
    )
    share = model.config.of_rank(prefill.parallel.tp, layers)
    return share.cost(model.dtype, prefill.linear_shards, experts)


def _facts(config: DeployConfig, model: DecoderConfig) -> ModelFacts:
    dtype = model.served_dtype(config.model)
    geometry = model.kv_geometry(config.model.name, dtype, config.kv.page_size)
    return ModelFacts(config=model, geometry=geometry, dtype=dtype)


def _cached(repository: str) -> Path | None:
    """Return the folder of a repository in this machine's Hugging Face cache."""
    # The import takes longer than the rest of the command.
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(repository, "config.json")
    except ValueError as error:  # no possible name
        raise ConfigError([Problem("model.path", f"got {repository!r}; {error}")]) from error
    return Path(found).parent if isinstance(found, str) else None
