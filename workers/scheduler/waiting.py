"""The sequences that wait for pages, in the order in which they came; and what the first of them is spared."""

import heapq
from bisect import insort
from collections.abc import Iterator

from cluster.spec.ids import Room
from workers.scheduler.sequence import Sequence

LOOKAHEAD = 256
"""Most sequences that are looked at in one step, however many wait."""


class Waiting:
    """A retracted sequence comes back to where it was."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.num_passed_pages = 0
        """Pages that others took though the oldest sequence may have to wait for them."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def oldest(self) -> Sequence | None:
        """The first to come."""
        return self._sequences[0] if self._sequences else None

    def add(self, sequence: Sequence) -> None:
        """Take in a sequence."""
        oldest = self.oldest
        insort(self._sequences, sequence, key=lambda other: other.arrival)
        self._spare_anew(oldest)

    def remove(self, room: Room) -> None:
        """Forget a sequence, if it waits."""
        oldest = self.oldest
        self._sequences = [sequence for sequence in self._sequences if sequence.room != room]
        self._spare_anew(oldest)

    def candidates(self) -> list[Sequence]:
        """Those that may have their turn now: the oldest and the first by priority."""
        first = heapq.nsmallest(LOOKAHEAD, self._sequences, key=lambda sequence: sequence.priority)
        return first if not first or self.oldest in first else [self._sequences[0], *first]

    def _spare_anew(self, oldest: Sequence | None) -> None:
        if self.oldest is not oldest:
            self.num_passed_pages = 0
