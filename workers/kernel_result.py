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
    TO_HOST = "to_host"
    """That of a copy to pinned host memory."""
    FROM_HOST = "from_host"
    """And of one from there."""


class Way(StrEnum):
    """What a kernel is timed beside."""

    UNJOINED = "unjoined"
    """The same launch, whose parts are left and counted but joined by nobody."""
    TORCH = "torch"
    """The same by torch alone: draws, and its own attention (SDPA) over keys in rows, a call for each length."""
    FLASH_ATTN = "flash_attn"
    """The same by that package, where it is installed."""


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
    to_host_bytes_per_s: float | None = None
    """None for what has no link, or where nobody asks for it."""
    from_host_bytes_per_s: float | None = None
    """The other direction of the same link, which may be faster or slower."""

    def share(self, limit: Limit, work: float, seconds: float) -> float | None:
        """What work of a kind in so many seconds is of the most; None where that is not known."""
        rates = {
            Limit.FLOPS: self.flops_per_s,
            Limit.BYTES: self.bytes_per_s,
            Limit.TO_HOST: self.to_host_bytes_per_s,
            Limit.FROM_HOST: self.from_host_bytes_per_s,
        }
        most = rates[limit]
        return None if most is None else work / most / seconds

    @property
    def is_h200(self) -> bool:
        """Whether its figures are to be held against H200."""
        return self.device.startswith(H200.device)


H200 = ChipLimits(device="NVIDIA H200", flops_per_s=790e12, bytes_per_s=4.3e12)
"""Not measured: what the goals for kernels on one are shares of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResult:
    """One line of the output; times are medians."""

    model: str
    kernel: str
    limit: Limit
    work: float
    seconds: float
    share_of_limit: float | None
    """1 for a kernel that takes no longer than its work must."""
    share_of_h200: float | None = None
    """Of H200's figure, on one."""
    share_of_joining: float | None = None
    """By how much of the time it would be shorter if its parts were left and counted, but joined by nobody."""
    torch_seconds: float | None = None
    """The same by torch alone; see Way."""
    flash_attn_seconds: float | None = None
