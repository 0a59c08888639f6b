"""Work of a model and speed of one rank: the inputs of every estimate. No torch, no I/O."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Work of a model's layers, or of one rank's part of them."""

    num_layers: int
    linear_flops: int
    """FLOPs of one token in one layer, without attention."""
    kv_flops: int
    """Part of them that makes its K and V, which is all that most tokens need in the last layer."""
    attention_flops: int
    """FLOPs of one (query, key) pair in one layer, over all heads."""
    kv_row_bytes: int
    """Bytes of K and V of one token in one layer."""
    q_row_bytes: int
    """Bytes of the queries of one token in one layer."""

    @property
    def partial_row_bytes(self) -> int:
        """Return bytes of the partial of one token in one layer, in fp32: 4 bytes where a pair takes 4 FLOPs."""
        return self.attention_flops


ALL_REDUCES = 2
"""All-reduces of a layer: after attention and after the MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speed of one rank. The defaults replace what could not be measured: one CPU core, ranks on one host."""

    step_s: float = 4e-3
    """Time of a step that computes almost nothing, over all layers."""
    linear_flops_per_s: float = 1e11
    attention_flops_per_s: float = 5e10
    run_s: float = 8e-5
    """Time of one call of attention, however short the run; over pages a run of step n takes n calls."""
    row_s: float = 5e-7
    """Time to store or read the KV of one token in one layer."""
    merge_row_s: float = 5e-7
    """Time to merge one partial of one token in one layer."""
    exchange_s: float = 3e-4
    """Time of one collective, however little it moves."""
    exchange_bytes_per_s: float = 1e9
    """Bytes that one rank receives per second."""
    all_reduce_s: float = 0.0
    """Time to sum hidden states over TP ranks, however few tokens; 0 on one rank, like the next."""
    all_reduce_row_s: float = 0.0
    """Time that each token adds to it."""
    hidden_share: float = 0.0
    """Part of a collective's time that passes while this rank computes; 0 where ranks do the copying."""
