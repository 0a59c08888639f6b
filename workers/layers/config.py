"""Layer shapes as plain data. Does not import torch, so that the planner can use them."""

from dataclasses import dataclass, replace
from typing import Literal

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention (Ainslie et al., 2023) with rotary positions."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """True to normalize each head of queries and keys before rotation."""

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Return the number of elements in one token's keys, which is also the number in its values."""
        return self.num_kv_heads * self.head_dim

    def of_rank(self, tp_size: int) -> "AttentionConfig":
        return replace(self, num_heads=self.num_heads // tp_size, num_kv_heads=max(1, self.num_kv_heads // tp_size))


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
class MoeConfig:
    """Mixture of experts, of which a router chooses a few for each token."""

    num_experts: int
    top_k: int
    """Number of experts per token."""
    intermediate_size: int
    renormalize: bool
    """True to scale the weights of a token's experts to a sum of 1."""
    shared_size: int = 0
    """Width of the expert that all tokens share, scaled by a sigmoid gate. 0 if there is none."""

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
    """Rotary position embedding. Fields that its type does not use keep their defaults."""

    rope_type: RopeType
    theta: float
    """Base of the frequencies. Before scaling, frequency i of d/2 is theta ** (-2i/d)."""
    max_position_embeddings: int
    """Length in tokens beyond which `dynamic` scales frequencies."""
    original_max_position_embeddings: int
    """Pre-training length in tokens, for `llama3` and `yarn`."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    """Scale of cosines and sines for `yarn`. If None, it is derived from factor, mscale and mscale_all_dim."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
