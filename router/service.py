"""What the HTTP routes stand on, in one place."""

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cluster.grammar import Grammars
from cluster.spec.config import DeployConfig
from cluster.spec.errors import UserError
from cluster.tokenizer import Tokenizer
from router.directory import Directory
from router.gate import Gate
from router.key_limits import KeyLimits
from router.key_ring import KeyRing
from router.metrics import Metrics
from router.reasoning import has_thoughts
from router.recent import MAX_KEPT, RecentRequests
from router.relay import Relay
from router.sampling_defaults import SamplingDefaults, defaults_of
from router.siblings import Siblings
from router.tool_calls.dialects import Dialect, find_dialect
from router.tracing import Tracing


@dataclass(frozen=True, kw_only=True)
class Service:
    """One router's parts and the facts its answers repeat."""

    config: DeployConfig
    tokenizer: Tokenizer
    relay: Relay
    directory: Directory
    metrics: Metrics
    grammars: Grammars
    gate: Gate
    limits: KeyLimits
    keys: KeyRing
    siblings: Siblings
    tracing: Tracing | None = None
    """None where nobody collects traces."""
    recent: RecentRequests = field(default_factory=RecentRequests)
    created_s: int = field(default_factory=lambda: int(time.time()))
    """Unix time of the start."""

    @property
    def model(self) -> str:
        """The name clients use."""
        return self.config.model.name

    @cached_property
    def dialect(self) -> Dialect | None:
        """How the model writes tool calls; None for a model without tools."""
        return find_dialect(self.config.router.tool_parser, self.tokenizer.chat_template)

    @cached_property
    def sampling_defaults(self) -> SamplingDefaults:
        """How tokens are drawn where a request does not say."""
        is_models = self.config.model.sampling_defaults == "model"
        return defaults_of(self.tokenizer.generation_config) if is_models else SamplingDefaults()

    @cached_property
    def has_thoughts(self) -> bool:
        """Thoughts are split off answers."""
        return has_thoughts(self.config.router.reasoning_parser, self.tokenizer.chat_template)

    @property
    def router_state(self) -> dict[str, object]:
        """What is open and what waits in all router processes."""
        return {
            "open": self.relay.num_open + self.siblings.num_open,
            "waiting": self.gate.num_waiting + self.siblings.num_waiting,
            "draining": self.relay.is_paused,
        }

    @property
    def newest(self) -> list[dict[str, Any]]:
        """The requests that ended last, in all router processes."""
        told = [*self.recent.tell(), *(line for figures in self.siblings.figures() for line in figures.recent)]
        return sorted(told, key=lambda line: line["ended"], reverse=True)[:MAX_KEPT]

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together that the model can have."""
        return max_context(self.config, self.tokenizer)

    @property
    def max_tokens(self) -> int:
        """Most tokens of prompt and answer together: of the model's context, and of the replicas' pools once known."""
        pool_tokens = self.directory.pool_tokens
        return self.max_context if pool_tokens is None else min(self.max_context, pool_tokens)


def max_context(config: DeployConfig, tokenizer: Tokenizer) -> int:
    """The configured limit, else the model's own.

    Raises:
        UserError: neither says.
    """
    limit = config.model.max_context or tokenizer.max_context
    if limit is None:
        raise UserError("model.max_context: not given, and the model's config.json has no max_position_embeddings")
    return limit
