"""Case of `baton bench kernels`, and data for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.bench.device_limits import Launch
from workers.bench.results import Limit

NUM_EXPERTS = 8
"""Number of experts. Each is as wide as the shape's MLP, and all get the same number of tokens."""
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class KernelCase:
    kernel: str
    limit: Limit
    work: float
    """Minimum number of FLOPs, or of bytes read and written."""
    run: Launch
    peers: Mapping[str, Launch] = field(default_factory=dict)
    """Other implementations by name: torch, flash_attn."""


def random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(DTYPE)


def rows_by_expert(num_rows: int) -> list[int]:
    return [num_rows // NUM_EXPERTS + (expert < num_rows % NUM_EXPERTS) for expert in range(NUM_EXPERTS)]
