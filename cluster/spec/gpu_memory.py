"""What a GPU's memory is divided into, and what is left for pages. Pure arithmetic."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """GiB of one worker's GPU."""

    total: float
    fraction: float
    """``kv.memory_fraction``"""
    weights: float
    activations: float
    """Most that a step takes."""
    graphs: float = 0.0
    """What recorded decode steps hold, beside what they read and write."""
    others: float = 0.0
    """What libraries and other processes hold."""

    @property
    def left(self) -> float:
        """For the page pool; negative where not even the rest fits."""
        return self.fraction * self.total - self.weights - self.activations - self.graphs - self.others

    def __str__(self) -> str:
        """The arithmetic in words."""
        return (
            f"{self.fraction:g} of {self.total:.4g} GiB of GPU memory, less {self.weights:.3g} for weights, "
            f"{self.activations:.3g} for activations, {self.graphs:.3g} for CUDA graphs and {self.others:.3g} for "
            f"others, leaves {self.left:.3g}"
        )
