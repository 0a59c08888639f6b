"""Requests whose received pages are being compared with the senders' digests. Sans I/O."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.spec.ids import Room
from cluster.spec.transfer_messages import CheckPages, PageDigests, PagesChecked

AGAIN_S = 10.0
"""Interval after which a rank that has not answered is asked again, since messages may be lost."""


@dataclass(slots=True)
class _Check:
    sent: Sequence[PageDigests]
    unchecked: set[int]
    """Ranks that have not answered."""
    again_s: float
    num_wrong: int = 0


class PageChecks:
    """Page checks of one replica. ``rank_addresses`` are ordered by global rank."""

    def __init__(self, rank_addresses: Sequence[str]) -> None:
        self._rank_addresses = rank_addresses
        self._checks: dict[Room, _Check] = {}
        self.num_wrong_pages = 0
        """Number of received pages so far whose bytes did not match the senders' digests."""

    def begin(self, room: Room, sent: Sequence[PageDigests], now_s: float) -> Iterator[tuple[str, CheckPages]]:
        """Start a request's check. Yield the messages to send to the ranks, with their addresses."""
        check = self._checks[room] = _Check(sent, {part.rank for part in sent}, now_s + AGAIN_S)
        return self._ask(room, check)

    def repeat(self, now_s: float) -> Iterator[tuple[str, CheckPages]]:
        for room, check in self._checks.items():
            if check.unchecked and check.again_s <= now_s:
                check.again_s = now_s + AGAIN_S
                yield from self._ask(room, check)

    def expects(self, checked: PagesChecked) -> bool:
        """Return whether this answer comes from a rank that was asked and has not answered yet."""
        check = self._checks.get(checked.room)
        return check is not None and checked.rank in check.unchecked

    def take(self, checked: PagesChecked) -> int | None:
        """Handle an expected answer. If it is the last, return the number of wrong pages on all ranks."""
        check = self._checks[checked.room]
        check.unchecked.remove(checked.rank)
        check.num_wrong += len(checked.wrong)
        self.num_wrong_pages += len(checked.wrong)
        return None if check.unchecked else check.num_wrong

    def _ask(self, room: Room, check: _Check) -> Iterator[tuple[str, CheckPages]]:
        for rank in sorted(check.unchecked):
            parts = [part for part in check.sent if part.rank == rank]
            yield self._rank_addresses[rank], CheckPages(room=room, digests=parts)

    def forget(self, room: Room) -> None:
        self._checks.pop(room, None)
