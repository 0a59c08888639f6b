"""Receiving side of transfers: a session per room, and checks of received pages. Sans I/O.

A session is a state machine: events and times in, states and messages out. Pages are never freed while a process may
still write to them.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from cluster.spec.errors import Moves, move
from cluster.spec.ids import Peer, Room
from cluster.spec.kv import NO_PAGE
from cluster.spec.registry import Verify
from cluster.spec.transfer_messages import (
    Accepted,
    CheckPages,
    Done,
    Drained,
    PageDigests,
    PagesChecked,
    Refused,
    Result,
    Revoke,
    Ticket,
)
from transfer.page_range import coverage_problem

TICKET_AGAIN_S = 10.0
"""Interval at which an unanswered ticket is sent again, since it may have been lost."""
REVOKE_AGAIN_S = 1.0
"""Interval at which an unanswered Revoke is sent again. Revokes are idempotent."""
CHECK_AGAIN_S = 10.0
"""Interval after which a rank that has not answered is asked again, since messages may be lost."""


class ReceiverState(Enum):
    """State of one transfer on the decode leader."""

    RESERVED = "reserved"
    """Pages are reserved, but no ticket has been sent."""
    TICKETED = "ticketed"
    """The ticket has been sent, and senders may write."""
    READY = "ready"
    """The result and every Done have arrived and agree, so no sender writes again. Final state."""
    REVOKING = "revoking"
    """The ticket has been revoked, but senders may write until they confirm this."""
    SETTLING = "settling"
    """The senders are dead, but bytes in flight may still arrive."""
    RELEASED = "released"
    """The transfer failed, and no sender writes again. Final state."""


_RECEIVER_MOVES: Moves[ReceiverState] = {
    ReceiverState.RESERVED: frozenset({ReceiverState.TICKETED, ReceiverState.RELEASED}),
    ReceiverState.TICKETED: frozenset(
        {ReceiverState.READY, ReceiverState.REVOKING, ReceiverState.SETTLING, ReceiverState.RELEASED}
    ),
    ReceiverState.REVOKING: frozenset({ReceiverState.SETTLING, ReceiverState.RELEASED}),
    ReceiverState.SETTLING: frozenset({ReceiverState.RELEASED}),
    ReceiverState.READY: frozenset(),
    ReceiverState.RELEASED: frozenset(),
}
_LISTENING = frozenset({ReceiverState.TICKETED, ReceiverState.REVOKING, ReceiverState.SETTLING})


class FailureKind(Enum):
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"
    """Prefill was silent for too long before all data had arrived."""
    REFUSED = "refused"
    STOPPED = "stopped"
    """Prefill stopped writing before the ticket was revoked."""
    MISMATCH = "mismatch"
    """The Dones or digests do not match the result or the ticket."""
    PREFILL_GONE = "prefill gone"


@dataclass(frozen=True, slots=True)
class TransferFailure:
    """First problem of a transfer. Later problems do not replace it."""

    kind: FailureKind
    reason: str
    """Explanation that names the replicas involved, unless the request was cancelled."""


class ReceiverSession:
    """Receiving side of one transfer on the decode leader.

    Prefill can take any amount of time to send its first part (Result or Done), since the prompt must wait in a queue
    and be computed, but it must answer repeated tickets. After that, prefill can be silent for at most ``silence_s``.
    Each event method returns the message for the prefill leader, if any. Messages from another room or incarnation,
    duplicates and late messages have no effect and are counted. Times are attentive seconds of the decode leader.
    """

    def __init__(
        self,
        ticket: Ticket,
        prefill: Peer,
        *,
        num_pages: int,
        num_bytes: int,
        num_ranks: int,
        silence_s: float,
        settle_s: float,
        verify: Verify = Verify.COUNTS,
        num_copies: int = 1,
    ) -> None:
        """Create a session in state RESERVED.

        Args:
            num_pages: number of ticketed pages. The Dones report a multiple of it if pages are sent in parts.
            num_bytes: bytes that the Dones must report in total.
            num_ranks: number of decode ranks.
            silence_s: maximum time between messages from prefill; before its first part, rounded up to tickets.
            settle_s: time for which bytes may still arrive after their sender has died.
            verify: check of the pages; DIGEST requires digests in every Done.
            num_copies: number of ranks that hold the same heads; each receives its share of the pages.
        """
        self.ticket, self.prefill = ticket, prefill
        self.state = ReceiverState.RESERVED
        self.failure: TransferFailure | None = None
        self.result: Result | None = None
        self.num_dropped: Counter[str] = Counter()
        """Ignored messages by reason: foreign, duplicate, or the state in which they arrived late."""
        self._expected = (num_pages, num_bytes)
        self._num_ranks, self._num_copies = num_ranks, num_copies
        self._verify = verify
        self._dones: dict[int, Done] = {}
        self._silence_s = silence_s
        self._num_unanswered = 0
        """Number of tickets sent since prefill's latest message."""
        self._settle_s = settle_s
        self._wake_at_s = 0.0

    @property
    def may_free(self) -> bool:
        """Return whether the pages can be freed because no sender can write to them any more."""
        return not _RECEIVER_MOVES[self.state]

    @property
    def digests(self) -> list[PageDigests]:
        """Digests that the senders have reported so far for written pages."""
        return [part for done in self._dones.values() for part in done.digests]

    def open(self, now_s: float) -> Ticket:
        """Return the ticket to send to the prefill leader."""
        self._move(ReceiverState.TICKETED, "open")
        return self._send_ticket(now_s)

    def handle(self, message: Accepted | Result | Done | Refused | Drained, now_s: float) -> Revoke | None:
        if self._is_foreign(message):
            self.num_dropped["foreign"] += 1
            return None
        if self.state not in _LISTENING:
            self.num_dropped[self.state.value] += 1
            return None
        self._num_unanswered = 0
        match message:
            case Result():
                return self._on_result(message, now_s)
            case Done():
                return self._on_done(message, now_s)
            case Refused():
                self._fail(FailureKind.REFUSED, f"{self.prefill.replica} refused: {message.reason}")
                self._move(ReceiverState.RELEASED, "refused")
            case Drained():
                self._fail(FailureKind.STOPPED, f"{self.prefill.replica} stopped the transfer early")
                self._move(ReceiverState.RELEASED, "drained")
        return None

    def cancel(self, reason: str, now_s: float) -> Revoke | None:
        """Cancel the transfer because the decode replica no longer needs the request."""
        if self.state is ReceiverState.RESERVED:
            self._fail(FailureKind.CANCELLED, reason)
            self._move(ReceiverState.RELEASED, "cancel")
        return self._revoke(FailureKind.CANCELLED, reason, now_s)

    def prefill_gone(self, now_s: float) -> None:
        """Handle the confirmed death of the prefill processes."""
        if self.may_free or self.state is ReceiverState.SETTLING:
            return
        self._fail(FailureKind.PREFILL_GONE, f"{self.prefill.replica} died before the transfer was complete")
        if self.state is ReceiverState.RESERVED or self._settle_s == 0:
            self._move(ReceiverState.RELEASED, "prefill gone")
        else:
            self._wake_at_s = now_s + self._settle_s
            self._move(ReceiverState.SETTLING, "prefill gone")

    def tick(self, now_s: float) -> Ticket | Revoke | None:
        """Handle the passing of time. A timeout revokes the ticket but never frees pages."""
        if self.state not in _LISTENING or now_s < self._wake_at_s:
            return None
        if self.state is ReceiverState.SETTLING:
            self._move(ReceiverState.RELEASED, "settled")
            return None
        if self.state is ReceiverState.REVOKING:
            return self._revoke_message(now_s)
        has_begun = self.result is not None or self._dones
        if not has_begun and self._num_unanswered <= math.ceil(self._silence_s / TICKET_AGAIN_S):
            return self._send_ticket(now_s)
        return self._revoke(FailureKind.TIMED_OUT, self._missing(), now_s)

    def _send_ticket(self, now_s: float) -> Ticket:
        self._num_unanswered += 1
        self._wake_at_s = now_s + TICKET_AGAIN_S
        return self.ticket

    def _missing(self) -> str:
        if self._num_unanswered:
            names = f"{self._num_unanswered} tickets of {self.ticket.decode.replica}"
            return f"{self.prefill.replica} answered none of {names}"
        missing = "the result"
        if self.result is not None:
            ranks = ", ".join(str(rank) for rank in sorted(set(self.result.senders) - self._dones.keys()))
            missing = f"the pages of rank{'s' * (',' in ranks)} {ranks}"
        return (
            f"{self.ticket.decode.replica} waited for {missing} from {self.prefill.replica}, "
            f"which sent nothing for {self._silence_s:g} s"
        )

    def _on_result(self, message: Result, now_s: float) -> Revoke | None:
        if self.result is None:
            self.result = message
            return self._check_complete(now_s)
        return self._on_repeated(message == self.result, now_s)

    def _on_done(self, message: Done, now_s: float) -> Revoke | None:
        known = self._dones.setdefault(message.sender_rank, message)
        if known is message:
            return self._check_complete(now_s)
        return self._on_repeated(message == known, now_s)

    def _on_repeated(self, is_equal: bool, now_s: float) -> Revoke | None:
        self.num_dropped["duplicate"] += 1
        if is_equal:
            return None
        reason = (
            f"{self.prefill.replica} reported two different results of one transfer to {self.ticket.decode.replica}"
        )
        return self._revoke(FailureKind.MISMATCH, reason, now_s)

    def _check_complete(self, now_s: float) -> Revoke | None:
        """End the transfer if the result and every Done have arrived; revoke its ticket if they do not agree."""
        if self.state is ReceiverState.TICKETED:
            self._wake_at_s = now_s + self._silence_s
        if self.result is None or not self._dones.keys() >= set(self.result.senders):
            return None
        if reason := self._mismatch(self.result):
            return self._revoke(FailureKind.MISMATCH, reason, now_s)
        if self.failure is not None and self.failure.kind is FailureKind.MISMATCH:
            return None
        is_wanted = self.state is ReceiverState.TICKETED
        self._move(ReceiverState.READY if is_wanted else ReceiverState.RELEASED, "complete")
        return None

    def _mismatch(self, result: Result) -> str | None:
        name = self.prefill.replica
        if unknown := self._dones.keys() - set(result.senders):
            return f"{name}: ranks {sorted(unknown)} sent pages, but the result names only {sorted(result.senders)}"
        dones = self._dones.values()
        sent = (sum(done.num_pages for done in dones), sum(done.num_bytes for done in dones))
        promised = (result.num_pages, result.num_bytes)
        num_pages, num_bytes = self._expected
        if sent == promised and sent[0] % max(num_pages, 1) == 0 and sent[0] >= num_pages and sent[1] == num_bytes:
            return self._digest_problem(num_bytes) if self._verify is Verify.DIGEST else None
        return (
            f"{name} sent {sent[0]} pages with {sent[1]} bytes, its result promised {promised[0]} pages with "
            f"{promised[1]} bytes, and {self.ticket.decode.replica} expected {num_pages} pages with {num_bytes} bytes"
        )

    def _digest_problem(self, num_bytes: int) -> str | None:
        """Return why the digests do not cover every byte exactly once, or None if they do."""
        pages = [page for pages in self.ticket.pages for page in pages if page != NO_PAGE]
        if reason := coverage_problem(self.digests, pages, num_bytes, self._num_ranks, self._num_copies):
            return f"digests of {self.prefill.replica}: {reason} (transfer.verify)"
        return None

    def _is_foreign(self, message: Accepted | Result | Done | Refused | Drained) -> bool:
        sender = (message.prefill.replica, message.prefill.incarnation)
        return (message.room, message.decode_incarnation, *sender) != (
            self.ticket.room,
            self.ticket.decode.incarnation,
            self.prefill.replica,
            self.prefill.incarnation,
        )

    def _revoke(self, kind: FailureKind, reason: str, now_s: float) -> Revoke | None:
        if self.state is not ReceiverState.TICKETED:
            return None
        self._fail(kind, reason)
        self._move(ReceiverState.REVOKING, kind.value)
        return self._revoke_message(now_s)

    def _revoke_message(self, now_s: float) -> Revoke:
        self._wake_at_s = now_s + REVOKE_AGAIN_S
        return Revoke(
            room=self.ticket.room,
            decode=self.ticket.decode,
            prefill_incarnation=self.prefill.incarnation,
        )

    def _fail(self, kind: FailureKind, reason: str) -> None:
        self.failure = self.failure or TransferFailure(kind, reason)

    def _move(self, state: ReceiverState, event: str) -> None:
        self.state = move(_RECEIVER_MOVES, self.state, state, event, f"receiver of room {self.ticket.room}")


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
        check = self._checks[room] = _Check(sent, {part.rank for part in sent}, now_s + CHECK_AGAIN_S)
        return self._ask(room, check)

    def repeat(self, now_s: float) -> Iterator[tuple[str, CheckPages]]:
        for room, check in self._checks.items():
            if check.unchecked and check.again_s <= now_s:
                check.again_s = now_s + CHECK_AGAIN_S
                yield from self._ask(room, check)

    def expects(self, checked: PagesChecked) -> bool:
        """Return whether this answer comes from a rank that was asked and has not answered yet."""
        check = self._checks.get(checked.room)
        return check is not None and checked.rank in check.unchecked

    def take(self, checked: PagesChecked) -> int | None:
        """Handle an expected answer. If it is the last one, return the number of wrong pages on all ranks."""
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
