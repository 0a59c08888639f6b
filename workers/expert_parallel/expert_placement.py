"""Placement of experts on ranks. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """A table from logical experts, the model's own, to physical ones, of which EP ranks hold equal runs."""

    physical: tuple[int, ...]
    """Physical expert of every logical one; no two share one."""
    num_ranks: int
    """EP ranks."""

    def __post_init__(self) -> None:
        assert sorted(self.physical) == list(range(len(self.physical))), f"not one to one: {self.physical}"
        assert len(self.physical) % self.num_ranks == 0, f"{len(self.physical)} experts over {self.num_ranks} ranks"

    @property
    def num_local(self) -> int:
        """Experts of one rank: physical expert p is number p mod num_local on EP rank p div num_local."""
        return len(self.physical) // self.num_ranks

    def logical(self, ep_rank: int) -> Sequence[int]:
        """Return the logical experts of one rank, in the order of its physical ones."""
        logical = sorted(range(len(self.physical)), key=self.physical.__getitem__)
        return logical[ep_rank * self.num_local : (ep_rank + 1) * self.num_local]


def in_order(num_experts: int, num_ranks: int) -> ExpertPlacement:
    """Return the placement that keeps the model's own numbers."""
    return ExpertPlacement(tuple(range(num_experts)), num_ranks)
