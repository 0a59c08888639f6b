"""Case of `baton bench kernels`, its sizes, and data for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.bench.device_limits import Launch
from workers.bench.results import Limit

NUM_EXPERTS = 8
"""Number of experts. Each is as wide as the shape's MLP, and all get the same number of tokens."""
DTYPE = torch.bfloat16
PAGE_SIZE = 64


@dataclass(frozen=True, slots=True)
class KernelCase:
    kernel: str
    limit: Limit
    work: float
    """Minimum number of FLOPs, or of bytes read and written."""
    run: Launch
    peers: Mapping[str, Launch] = field(default_factory=dict)
    """Other implementations by name: torch, flash_attn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    prompt_len: int = 8192
    prefix_len: int = 30_720
    chunk_len: int = 2048
    decode_rows: int = 16
    decode_len: int = 32_768
    decode_kv_bytes: int = 2 << 30
    """KV bytes of a batch of requests with ``decode_len`` tokens each."""
    long_len: int = 131_072
    """Length of a request that is decoded alone and in a batch with short requests."""
    short_len: int = 2000
    num_short: int = 63


def random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(DTYPE)


def rows_by_expert(num_rows: int) -> list[int]:
    return [num_rows // NUM_EXPERTS + (expert < num_rows % NUM_EXPERTS) for expert in range(NUM_EXPERTS)]
