"""Division of a worker's host memory. Pure arithmetic."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Host memory of one worker in GiB; a process's own few hundred MiB come on top."""

    weights: float
    """Weights on a CPU; 0 on a GPU."""
    pages: float
    """Page pool, or the staging buffer for a GPU's pages."""
    cached: float
    """Value of ``hicache.host_gib``."""
    lent: float
    """Value of ``hicache.storage.lent_gib``."""
    passing: float
    """Buffers of a Mooncake Store client for objects in transit."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.weights + self.pages + self.cached + self.lent + self.passing

    def __str__(self) -> str:
        parts = {
            "for weights": self.weights,
            "for pages": self.pages,
            "for cached pages": self.cached,
            "lent to storage": self.lent,
            "for what passes to and from storage": self.passing,
        }
        return f"{self.total:.3g} GiB: " + ", ".join(f"{gib:.3g} {name}" for name, gib in parts.items() if gib)
