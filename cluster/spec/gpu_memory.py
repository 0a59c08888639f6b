"""Division of a GPU's memory, and what is left for pages. Pure arithmetic."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Memory of one worker's GPU in GiB."""

    total: float
    fraction: float
    """Value of ``kv.memory_fraction``."""
    weights: float
    activations: float
    """Maximum activations of a step."""
    graphs: float = 0.0
    """Memory of captured decode steps, besides their inputs and outputs."""
    others: float = 0.0
    """Memory of libraries and other processes."""

    @property
    def left(self) -> float:
        """Memory left for the page pool; negative if not even the rest fits."""
        return self.fraction * self.total - self.weights - self.activations - self.graphs - self.others

    def __str__(self) -> str:
        return (
            f"{self.fraction:g} of {self.total:.4g} GiB of GPU memory, less {self.weights:.3g} for weights, "
            f"{self.activations:.3g} for activations, {self.graphs:.3g} for CUDA graphs and {self.others:.3g} for "
            f"others, leaves {self.left:.3g}"
        )
