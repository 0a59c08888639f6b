"""Keys of the deploy file for the HTTP endpoint."""

from typing import Annotated, Literal

from pydantic import Field

from cluster.spec.clock import MOST_S
from cluster.spec.config_node import Node, Origin, PositiveInt, PositiveSeconds, Text
from cluster.spec.strategy import DpPolicy

PolicyName = Literal[
    "round_robin",
    "random",
    "power_of_two",
    "least_requests",
    "least_tokens",
    "prefix_aware",
    "session",
    "follow_room",
]
ToolParserName = Literal[
    "auto",
    "hermes",
    "llama3",
    "qwen3_coder",
    "glm47",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "kimi_k2",
    "none",
]
ReasoningParser = Literal["auto", "qwen3", "none"]


class RouterConfig(Node):
    """The HTTP endpoint."""

    host: Text = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535, strict=True)] = 8000
    """Port to listen on; 0 for any free port."""
    processes: Annotated[int, Field(ge=1, le=64, strict=True)] = 1
    """Number of router processes that share the port. Each enforces an equal share of every limit on requests and
    tokens, at least 1."""
    prefill_policy: PolicyName = "prefix_aware"
    """Policy that picks the prefill replica of a request."""
    decode_policy: PolicyName = "least_tokens"
    """Policy that picks the decode replica of a request."""
    dp_policy: DpPolicy = DpPolicy.LEAST_TOKENS
    """Policy that picks the DP rank of a request in each replica; a valid `X-data-parallel-rank` header takes
    precedence."""
    tool_parser: ToolParserName = "auto"
    """Format of the model's tool calls; `auto` detects it from the chat template."""
    reasoning_parser: ReasoningParser = "auto"
    """Parser that separates reasoning (`<think>`) from answers; `auto` detects it from the chat template."""
    max_waiting_requests: Annotated[int, Field(ge=0, strict=True)] = 256
    """Maximum number of requests that wait in the router until a replica has capacity; further requests get 429."""
    max_wait_s: PositiveSeconds = 10.0
    """Seconds that a request may wait in the router before it gets 429."""
    api_keys_file: Text | None = None
    """YAML file with a list of API keys (name, key, max_requests, tokens_per_minute, priority, weight, cache); by
    default no key is needed."""
    allowed_origins: tuple[Origin, ...] = ()
    """Origins of web pages that may use the endpoint from a browser (CORS); `["*"]` for all, none by default."""
    key_max_requests: PositiveInt | None = None
    """Maximum number of open requests of one API key, where every choice counts; no limit by default."""
    key_tokens_per_minute: PositiveInt | None = None
    """Maximum number of prompt and answer tokens of one API key per minute; no limit by default."""
    request_timeout_s: PositiveSeconds = 3600.0
    """Seconds after which an unfinished request fails."""
    parity_probe_s: Annotated[float, Field(ge=0, le=MOST_S, strict=True)] = 0.0
    """Seconds between parity probes, in which a decode replica computes a finished request again without caches and
    log-probabilities are compared; 0 for none. The longest probe has `decode.chunk_tokens` tokens per 4 s of this
    time, and at most 262,144."""
    drain_s: PositiveSeconds = 20.0
    """Seconds to wait, when the cluster or a replica is drained, for open requests and for pages that `hicache` still
    has to store."""
