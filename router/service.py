"""The parts of one router that its HTTP routes use, and the facts their answers repeat."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.grammar import Grammars
from cluster.spec.config import DeployConfig
from cluster.spec.errors import UserError
from cluster.spec.worker_spec import RouterShare
from cluster.tokenizer import Tokenizer
from router.admission import Gate, KeyLimits
from router.directory import Directory
from router.dispatch import RequestTable
from router.finished import MAX_RECENT, FinishedRequest
from router.key_ring import KeyRing
from router.metrics import Metrics
from router.reasoning import has_thoughts
from router.relay import Relay
from router.sampling_defaults import SamplingDefaults, defaults_of
from router.tool_calls.dialects import Dialect, find_dialect
from router.tracing import Tracing


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about the model that the router needs besides its tokens."""

    name: str
    max_context: int
    """Most tokens of prompt and answer together."""
    dialect: Dialect | None
    """Format of the model's tool calls; None for a model without tools."""
    sampling_defaults: SamplingDefaults
    has_thoughts: bool
    """True if thoughts are split off answers."""


def read_model_facts(config: DeployConfig, tokenizer: Tokenizer) -> ModelFacts:
    """Combine configuration and model files."""
    max_context = config.model.max_context or tokenizer.max_context
    if max_context is None:
        raise UserError("model.max_context: not given, and the model's config.json has no max_position_embeddings")
    generation: Mapping[str, Any] = tokenizer.generation_config if config.model.sampling_defaults == "model" else {}
    return ModelFacts(
        name=config.model.name,
        max_context=max_context,
        dialect=find_dialect(config.router.tool_parser, tokenizer.chat_template),
        sampling_defaults=defaults_of(generation),
        has_thoughts=has_thoughts(config.router.reasoning_parser, tokenizer.chat_template),
    )


@dataclass(frozen=True, kw_only=True)
class Service:
    """One router process's parts."""

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
    """None where nobody collects traces."""
    recent: deque[FinishedRequest] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    """The newest first."""
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def state(self) -> dict[str, object]:
        return {
            "open": self.requests.num_open,
            "waiting": self.gate.num_waiting,
            "draining": self.relay.is_paused,
        }
