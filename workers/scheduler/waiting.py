"""Order in which sequences wait for pages. No I/O."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

from cluster.spec.ids import Room
from workers.scheduler.sequence import TokenSequence, urgency

LOOKAHEAD = 256
"""Maximum number of sequences examined per step."""

W = TypeVar("W", bound=TokenSequence)


class Waiting(Generic[W]):
    """Waiting sequences by arrival and by priority. A preempted sequence returns to its old position."""

    def __init__(self) -> None:
        self._by_room: dict[Room, W] = {}
        self._by_arrival: list[W] = []
        self._by_priority: list[W] = []
        self._num_overtaken_pages = 0
        """Number of pages that others took while the oldest sequence needed them."""
        self._blocked: set[W] = set()
        """Sequences that could not start. They are tried again when ``_num_gains`` or the oldest sequence changes."""
        self._num_gains = 0

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __contains__(self, room: Room) -> bool:
        return room in self._by_room

    def __iter__(self) -> Iterator[W]:
        return iter(self._by_arrival)

    @property
    def oldest(self) -> W | None:
        return self._by_arrival[0] if self._by_arrival else None

    def add(self, sequence: W) -> None:
        oldest = self.oldest
        self._by_room[sequence.room] = sequence
        insort(self._by_arrival, sequence, key=_arrival)
        insort(self._by_priority, sequence, key=urgency)
        self._reset_if_changed(oldest)

    def remove(self, room: Room) -> None:
        sequence = self._by_room.pop(room, None)
        if sequence is None:
            return
        oldest = self.oldest
        self._blocked.discard(sequence)
        del self._by_arrival[bisect_left(self._by_arrival, _arrival(sequence), key=_arrival)]
        del self._by_priority[bisect_left(self._by_priority, urgency(sequence), key=urgency)]
        self._reset_if_changed(oldest)

    def candidates(self) -> list[W]:
        """Return the sequences to examine now: the most urgent sequences and the oldest one."""
        first = self._by_priority[:LOOKAHEAD]
        if not first or urgency(self._by_arrival[0]) <= urgency(first[-1]):
            return first
        return [*first, self._by_arrival[0]]

    def untried(self, num_gains: int) -> list[W]:
        """Return the candidates that have not failed to start since ``num_gains`` last changed."""
        blocked = self._still_blocked(num_gains)
        return [sequence for sequence in self.candidates() if sequence not in blocked]

    def is_blocked(self, sequence: W, num_gains: int) -> bool:
        """Return whether a sequence has failed to start and no page has become free since."""
        return sequence in self._still_blocked(num_gains)

    def note_blocked(self, sequence: W) -> None:
        """Skip a sequence until pages become free or the oldest sequence changes."""
        self._blocked.add(sequence)

    def most_overtaking(self, oldest_pages: int) -> int:
        """Return how many of the ``oldest_pages`` pages that the oldest sequence needs may go to others first."""
        return max(0, oldest_pages - self._num_overtaken_pages)

    def note_overtaken(self, num_pages: int) -> None:
        """Record that others took pages for which the oldest sequence may have to wait."""
        self._num_overtaken_pages += num_pages

    def _reset_if_changed(self, oldest: W | None) -> None:
        if self.oldest is not oldest:
            self._num_overtaken_pages = 0
            self._blocked.clear()

    def _still_blocked(self, num_gains: int) -> set[W]:
        if num_gains != self._num_gains:
            self._num_gains = num_gains
            self._blocked.clear()
        return self._blocked


def _arrival(sequence: TokenSequence) -> int:
    return sequence.arrival_number
