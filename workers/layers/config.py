"""Shapes of feed-forward parts and of rotary positions, as plain data. Does not import torch: the planner uses them."""

from dataclasses import dataclass, replace
from typing import Literal

FEW_CHOICES = 32_768
"""Maximum number of (token, expert) choices for which a GPU gives every choice a row, even if another rank holds the
expert, so that the host need not wait for counts. Rows take 128 MiB with a hidden size of 2,048 in bf16.
"""
MOST_ANSWER_BYTES = 64 << 20
"""Maximum size of the answers that a CPU's native code adds up at a time. More tokens are computed in parts."""

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig:
    intermediate_size: int
    bias: bool = False

    @property
    def dense_size(self) -> int:
        return self.intermediate_size

    def of_rank(self, tp_size: int) -> "MlpConfig":
        return replace(self, intermediate_size=-(-self.intermediate_size // tp_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRouterConfig:
    """Choice of a token's experts. The default is top-k of a softmax, computed in the model's dtype."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    is_fp32: bool = False
    """True to compute logits in fp32."""
    has_bias: bool = False
    """True to add a bias to each expert's score for the choice, but not to the weight of its output."""
    num_groups: int = 1
    """Number of groups of adjacent experts."""
    top_groups: int = 1
    """Number of groups whose experts a token can use: those with the best experts."""
    num_best: int = 1
    """Number of a group's best experts whose scores are added up to rank the group."""
    scale: float = 1.0
    """Factor of all weights, applied last."""

    @property
    def reach(self) -> float:
        """Return the share of all experts that one token can use."""
        return self.top_groups / self.num_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Mixture of experts, of which a router chooses a few for each token."""

    num_experts: int
    top_k: int
    """Number of experts per token."""
    intermediate_size: int
    renormalize: bool
    """True to scale the weights of a token's experts to a sum of 1."""
    shared_size: int = 0
    """Width of the expert that all tokens share. 0 if there is none."""
    has_shared_gate: bool = True
    """True to scale the shared expert's output by a sigmoid gate."""
    router: ExpertRouterConfig = ExpertRouterConfig()

    @property
    def dense_size(self) -> int:
        return self.shared_size

    def of_rank(self, tp_size: int) -> "MoeConfig":
        return replace(
            self,
            intermediate_size=-(-self.intermediate_size // tp_size),
            shared_size=-(-self.shared_size // tp_size),
        )


FeedForwardConfig = MlpConfig | MoeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Fields that its type does not use have default values."""

    rope_type: RopeType
    theta: float
    """Base of the frequencies. Before scaling, frequency i of d/2 is theta ** (-2i/d)."""
    max_position_embeddings: int
    """Length in tokens beyond which `dynamic` scales frequencies."""
    original_max_position_embeddings: int
    """Pre-training length in tokens, for `llama3` and `yarn`."""
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    attention_factor: float | None
    """Scale of cosines and sines for `yarn`. If None, it is derived from factor, mscale and mscale_all_dim."""
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool
