"""Requests whose ranks compare their pages with what was sent. Sans I/O."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.spec.ids import Room
from cluster.spec.transfer_messages import CheckPages, PageDigests, PagesChecked


@dataclass(slots=True)
class _Check:
    unchecked: set[int]
    """Ranks that have not answered."""
    num_wrong: int = 0


class PageChecks:
    """Of one replica."""

    def __init__(self, rank_addresses: Sequence[str]) -> None:
        """By global rank."""
        self._rank_addresses = rank_addresses
        self._checks: dict[Room, _Check] = {}
        self.num_wrong_pages = 0
        """Pages that were not as they were sent, since the start."""

    def begin(self, room: Room, told: Sequence[PageDigests]) -> Iterator[tuple[str, CheckPages]]:
        """What each rank is asked, and where."""
        ranks = {part.rank for part in told}
        self._checks[room] = _Check(ranks)
        for rank in sorted(ranks):
            parts = [part for part in told if part.rank == rank]
            yield self._rank_addresses[rank], CheckPages(room=room, told=parts)

    def expects(self, checked: PagesChecked) -> bool:
        """Whether this rank has not answered yet."""
        check = self._checks.get(checked.room)
        return check is not None and checked.rank in check.unchecked

    def take(self, checked: PagesChecked) -> int | None:
        """An expected answer; how many pages were wrong on all ranks, once the last one has answered."""
        check = self._checks[checked.room]
        check.unchecked.remove(checked.rank)
        check.num_wrong += len(checked.wrong)
        self.num_wrong_pages += len(checked.wrong)
        return None if check.unchecked else check.num_wrong

    def forget(self, room: Room) -> None:
        """The request has ended, or runs."""
        self._checks.pop(room, None)
