"""Requests and results that benchmark processes exchange with the command line. Does not import torch."""

from dataclasses import dataclass
from enum import StrEnum

from cluster.spec.strategy import StrategySetting


class Limit(StrEnum):
    """Hardware limit of a kernel in the roofline model."""

    FLOPS = "flops"
    """Rate of bf16 matrix products."""
    FP8_FLOPS = "fp8_flops"
    """Rate of FP8 matrix products: tensor cores compute twice as many as in bf16."""
    BYTES = "bytes"
    """Bandwidth of a copy in device memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """Measured limits of a device."""

    device: str
    flops_per_s: float
    bytes_per_s: float

    def rate(self, limit: Limit) -> float:
        rates = {Limit.FLOPS: self.flops_per_s, Limit.FP8_FLOPS: 2 * self.flops_per_s, Limit.BYTES: self.bytes_per_s}
        return rates[limit]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResult:
    """Result line of `baton bench kernels`. Times are medians."""

    model: str
    kernel: str
    limit: Limit
    work: float
    """Minimum number of FLOPs or bytes."""
    us: float
    share_of_limit: float
    """Fraction of the device limit that this kernel reaches."""
    torch_us: float | None
    """Time with torch. For attention, this is SDPA over contiguous keys with one call per length."""
    flash_attn_us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """Result line of `baton bench engine`. Times are medians over rounds of greedy decoding."""

    model: str
    batch_size: int
    prompt_len: int
    output_len: int
    ttft_ms: float
    """Time until every request of the batch has its first token."""
    ttft_ratio: float
    """TTFT divided by the time that the prompts' FLOPs take at the measured rate of matrix products."""
    tpot_ms: float
    """Time per output token after the first."""
    tpot_ratio: float
    """TPOT divided by the time to read weights and KV at the measured bandwidth."""
    transformers_ttft_ms: float | None
    transformers_tpot_ms: float | None
    num_same_tokens: int | None
    """Length of the common prefix of both engines' answers, of the request where it is shortest."""
    transformers_problem: str | None
    """Reason why transformers was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Group size and strategy of a prefill step."""

    cp: int
    strategy: StrategySetting


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of one rank's part of a step."""

    seconds: float
    """Time from the common start to the end."""
    waited_s: float
    """Part of ``seconds`` that was spent in collectives."""
    projections_s: float = 0.0
    """Part of ``waited_s`` that was spent on projections of other ranks."""
    received_bytes: int = 0
