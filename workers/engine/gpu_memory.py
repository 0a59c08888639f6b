"""GPU memory that weights, the largest step and CUDA graphs take, and so what is left for pages."""

from collections.abc import Callable

import torch

from cluster.spec.errors import UserError
from cluster.spec.memory import GIB, GpuMemory


def measure_memory(device: torch.device, fraction: float, run_largest_step: Callable[[], None]) -> GpuMemory:
    """Measure memory with the weights loaded and no pages yet; the step's own pages count as activations."""
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


def bytes_taken_by(device: torch.device, record: Callable[[], None]) -> int:
    """Return the GPU memory that a capture takes, whether torch, a library or the driver holds it."""
    free = _free_bytes(device)
    record()
    return max(free - _free_bytes(device), 0)


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def check_fits(memory: GpuMemory, pages_gib: float, key: str) -> None:
    """Raise UserError, with the arithmetic, if the memory left cannot hold the pages."""
    if memory.left < pages_gib:
        raise UserError(f"{key}: {pages_gib:.3g} GiB requested for pages, but {memory}")
