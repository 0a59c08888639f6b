"""What a worker's host memory is divided into. Pure arithmetic."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """GiB that one worker may take; a process's own few hundred MiB come on top."""

    weights: float
    """On a CPU; a GPU has its own."""
    pages: float
    """The pool, or what a GPU's pages pass through."""
    cached: float
    """``hicache.host_gib``, or ``host_ratio``"""
    lent: float
    """``hicache.storage.lent_gib``"""
    passing: float
    """What a client of Mooncake Store has for objects on their way."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.pages + self.cached + self.lent + self.passing

    def __str__(self) -> str:
        """The arithmetic in words."""
        parts = {
            "for weights": self.weights,
            "for pages": self.pages,
            "for cached pages": self.cached,
            "lent to storage": self.lent,
            "for what passes to and from storage": self.passing,
        }
        return f"{self.total:.3g} GiB: " + ", ".join(f"{gib:.3g} {name}" for name, gib in parts.items() if gib)
