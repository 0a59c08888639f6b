"""The work of a model, and how fast one rank does it: what every estimate is made of. No torch, no I/O."""

from dataclasses import dataclass

from cluster.spec.kv import DTYPE_BYTES
from workers.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The work of one TP rank for a model, by the shape of its part."""

    num_layers: int
    linear_flops: int
    """Of one token in one layer."""
    kv_flops: int
    """Of these, those of its K and V, which are all that most tokens need in the last layer."""
    attention_flops: int
    """Of one (query, key) pair in one layer, over all heads."""
    kv_row_bytes: int
    """K and V of one token in one layer."""
    q_row_bytes: int
    """The queries of one token in one layer."""

    @classmethod
    def of(cls, config: ModelConfig, dtype: str) -> "ModelShape":
        """The shape of a model, or of one rank's part of it, computed in a dtype."""
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return cls(
            num_layers=config.num_layers,
            linear_flops=2 * config.hidden_size * (2 * q_size + 2 * kv_size) + mlp_flops(config),
            kv_flops=2 * config.hidden_size * 2 * kv_size,
            attention_flops=4 * q_size,
            kv_row_bytes=2 * kv_size * DTYPE_BYTES[dtype],
            q_row_bytes=q_size * DTYPE_BYTES[dtype],
        )

    @property
    def partial_row_bytes(self) -> int:
        """What attention found for one token in one layer, in fp32: 4 bytes where a pair takes 4 FLOPs."""
        return self.attention_flops


def mlp_flops(config: ModelConfig) -> int:
    """Of one token in the MLP, or the experts, of one layer."""
    width = config.moe.num_chosen * config.moe.intermediate_size if config.moe else config.intermediate_size
    return 2 * config.hidden_size * 3 * width


ALL_REDUCES = 2
"""In each layer: after attention and after the MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast one rank is. The defaults stand in for what could not be measured: one CPU core, ranks on one host."""

    step_s: float = 4e-3
    """What a step takes however little is computed, over all layers."""
    linear_flops_per_s: float = 1e11
    attention_flops_per_s: float = 5e10
    run_s: float = 8e-5
    """One call of attention, however short the run; over pages a run of step n takes n calls."""
    row_s: float = 5e-7
    """Storing or reading the KV of one token in one layer."""
    merge_row_s: float = 5e-7
    """Merging one partial of one token in one layer."""
    exchange_s: float = 3e-4
    """One collective, however little it moves."""
    exchange_bytes_per_s: float = 1e9
    """By the bytes that one rank receives."""
    all_reduce_s: float = 0.0
    """Summing hidden states over TP ranks, however few; 0 on one rank, as the next."""
    all_reduce_row_s: float = 0.0
    """What each token's adds to it."""
    hidden_share: float = 0.0
    """Part of a collective's time that passes while this rank computes; 0 where ranks copy for themselves."""
