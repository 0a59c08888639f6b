"""What `baton bench kernels` reports, and of which models. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Limit(StrEnum):
    """What bounds a kernel."""

    FLOPS = "flops"
    """The rate of products of matrices in bf16."""
    BYTES = "bytes"
    """The bandwidth of a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """A layer as one TP rank has it."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    """Width of the MLP."""
    vocab: int


SHAPES: Mapping[str, HeadShape] = {
    "Llama-3-8B": HeadShape(heads=32, kv_heads=8, head_dim=128, hidden=4096, inner=14336, vocab=128_256),
    "Qwen3-8B": HeadShape(heads=32, kv_heads=8, head_dim=128, hidden=4096, inner=12288, vocab=151_936),
    "Qwen3-0.6B": HeadShape(heads=16, kv_heads=8, head_dim=128, hidden=1024, inner=3072, vocab=151_936),
    "Llama-3-70B/TP8": HeadShape(heads=8, kv_heads=1, head_dim=128, hidden=8192, inner=3584, vocab=128_256),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipLimits:
    """As measured, before anything else."""

    device: str
    flops_per_s: float
    bytes_per_s: float

    def of(self, limit: Limit) -> float:
        """Work of a kind in a second."""
        return self.flops_per_s if limit is Limit.FLOPS else self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResult:
    """One line of the output; times are medians."""

    model: str
    kernel: str
    limit: Limit
    work: float
    seconds: float
    share_of_limit: float
    """1 for a kernel that takes no longer than its work must."""
    torch_seconds: float | None = None
    """The same by torch alone: its own attention (SDPA), over keys that lie in rows, and draws."""
    flash_attn_seconds: float | None = None
    """The same by the flash_attn package, where that is installed."""
