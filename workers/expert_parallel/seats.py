"""Which rank holds which expert: a table from the experts that a model names to the seats that ranks have. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertSeats:
    """Logical experts are the model's own; physical ones are seats, given to the EP ranks in equal parts."""

    physical: tuple[int, ...]
    """The seat of every logical expert; no two have the same."""
    num_ranks: int
    """EP ranks."""

    def __post_init__(self) -> None:
        assert sorted(self.physical) == list(range(len(self.physical))), f"not one seat each: {self.physical}"
        assert len(self.physical) % self.num_ranks == 0, f"{len(self.physical)} experts over {self.num_ranks} ranks"

    @property
    def num_local(self) -> int:
        """Seats of one rank: physical expert p is seat p mod num_local of EP rank p div num_local."""
        return len(self.physical) // self.num_ranks

    def held(self, ep_rank: int) -> Sequence[int]:
        """The logical experts of one rank, by seat."""
        logical = sorted(range(len(self.physical)), key=self.physical.__getitem__)
        return logical[ep_rank * self.num_local : (ep_rank + 1) * self.num_local]


def in_order(num_experts: int, num_ranks: int) -> ExpertSeats:
    """Every expert in the seat of its own number."""
    return ExpertSeats(tuple(range(num_experts)), num_ranks)
