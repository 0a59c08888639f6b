"""The parts of a router that its HTTP routes use, and facts about the model."""

import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.grammar import Grammars
from cluster.spec.config import DeployConfig
from cluster.spec.errors import UserError
from cluster.spec.worker_spec import RouterShare
from cluster.tokenizer import Tokenizer
from router.admission import Gate, KeyLimits, KeyRing
from router.directory import Directory
from router.dispatch import RequestTable
from router.message import has_reasoning
from router.metrics import Metrics
from router.records import MAX_RECENT, Tracing
from router.relay import Relay
from router.tool_calls.dialects import Dialect, find_dialect

Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(ge=0, le=1)]
"""Value of top_p; 0 keeps only the most likely token."""
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
MinP = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]


class SamplingDefaults(BaseModel):
    """Defaults of sampling parameters: the model's, or else OpenAI's."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0


def defaults_of(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """Return the defaults in a model's generation_config.json; like vLLM, ignore invalid values and ``do_sample``."""
    allowed: dict[str, Any] = {}
    for name in SamplingDefaults.model_fields.keys() & generation_config.keys():
        with suppress(ValidationError):
            allowed[name] = getattr(SamplingDefaults.model_validate({name: generation_config[name]}), name)
    return SamplingDefaults(**allowed)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    name: str
    max_context: int
    """Maximum number of tokens in prompt and answer together."""
    dialect: Dialect | None
    """Format of the model's tool calls; None if it has none."""
    sampling_defaults: SamplingDefaults
    has_reasoning: bool


def read_model_facts(config: DeployConfig, tokenizer: Tokenizer) -> ModelFacts:
    max_context = config.model.max_context or tokenizer.max_context
    if max_context is None:
        raise UserError("model.max_context: not set, and the model's config.json has no max_position_embeddings")
    generation: Mapping[str, Any] = tokenizer.generation_config if config.model.sampling_defaults == "model" else {}
    return ModelFacts(
        name=config.model.name,
        max_context=max_context,
        dialect=find_dialect(config.router.tool_parser, tokenizer.chat_template),
        sampling_defaults=defaults_of(generation),
        has_reasoning=has_reasoning(config.router.reasoning_parser, tokenizer.chat_template),
    )


@dataclass(frozen=True, kw_only=True)
class Service:
    config: DeployConfig
    tokenizer: Tokenizer
    model: ModelFacts
    relay: Relay
    requests: RequestTable
    directory: Directory
    metrics: Metrics
    grammars: Grammars
    gate: Gate
    limits: KeyLimits
    keys: KeyRing
    share: RouterShare
    tracing: Tracing | None = None
    """Recorder of spans; None if no collector is configured."""
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    """Summaries of the most recently finished requests, newest first."""
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def state(self) -> dict[str, object]:
        return {
            "open": self.requests.num_open,
            "waiting": self.gate.num_waiting,
            "draining": self.relay.is_paused,
        }
