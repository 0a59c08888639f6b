"""Requests and results of the processes that benchmarks run. No torch: the process that asks needs none."""

from dataclasses import dataclass
from enum import StrEnum

from cluster.spec.strategy import CpMode, PassingSetting, StrategySetting


class Limit(StrEnum):
    """Hardware limit of a kernel: the roof of its roofline."""

    FLOPS = "flops"
    """Rate of bf16 matrix products."""
    BYTES = "bytes"
    """Bandwidth of a copy in device memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    device: str
    flops_per_s: float
    bytes_per_s: float

    def rate(self, limit: Limit) -> float:
        return self.flops_per_s if limit is Limit.FLOPS else self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResult:
    """Result line of `baton bench kernels`; times are medians."""

    model: str
    kernel: str
    limit: Limit
    work: float
    """FLOPs or bytes, at least."""
    seconds: float
    share_of_limit: float
    """1 for a kernel that takes no longer than its work must."""
    torch_seconds: float | None = None
    """Time of torch alone; attention by SDPA over contiguous keys, one call per length."""
    flash_attn_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """Result line of `baton bench engine`; times are medians of a greedy answer to one prompt."""

    model: str
    prompt_len: int
    output_len: int
    ttft_s: float
    tpot_s: float
    """Time per output token after the first."""
    ttft_floor_s: float
    """Time that the prompt's FLOPs take at the measured rate of matrix products."""
    tpot_floor_s: float
    """Time that reading weights and KV takes at the measured bandwidth."""
    ttft_ratio: float
    """Time to first token as a multiple of its floor."""
    tpot_ratio: float
    transformers_ttft_s: float | None
    transformers_tpot_s: float | None
    num_same_tokens: int | None
    """Length of the common prefix of both answers."""
    transformers_problem: str | None
    """Reason why transformers has no times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Method of computing a prefill step over CP ranks."""

    cp: int
    mode: CpMode = CpMode.GATHER
    strategy: StrategySetting = StrategySetting.NONE
    passing: PassingSetting | None = None
    """Passing setting in ring mode; None in gather mode."""


@dataclass(frozen=True, slots=True)
class StepLens:
    prompt_len: int
    prefix_len: int
    """Tokens that count as cached before the prompt."""

    @property
    def total(self) -> int:
        """Tokens that have KV after the step."""
        return self.prompt_len + self.prefix_len


@dataclass(frozen=True, slots=True)
class StepTime:
    seconds: float
    """Time from the common start to the end of this rank's part."""
    waited_s: float
    """Part of it inside collectives."""
