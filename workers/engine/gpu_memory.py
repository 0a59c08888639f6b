"""Measures what weights and the largest step take of a GPU, to tell what is left for pages."""

from collections.abc import Callable

import torch

from cluster.spec.errors import UserError
from cluster.spec.gpu_memory import GpuMemory
from cluster.spec.pool import GIB


def measure_memory(device: torch.device, fraction: float, run_largest_step: Callable[[], None]) -> GpuMemory:
    """Call when the weights are there and no pages yet; the step's own pages count as activations."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return GpuMemory(
        total=total / GIB,
        fraction=fraction,
        weights=weights / GIB,
        activations=(peak - weights) / GIB,
        others=max(others, 0) / GIB,
    )


def check_fits(memory: GpuMemory, pages_gib: float, key: str) -> None:
    """UserError, with the arithmetic, where not so much is left for pages."""
    if memory.left < pages_gib:
        raise UserError(f"{key}: {pages_gib:.3g} GiB are wanted for pages, but {memory}")
