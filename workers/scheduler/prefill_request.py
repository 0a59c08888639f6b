"""State of one request in a prefill leader, its legal transitions, the messages that end its ticket, and totals of
sends.
"""

from dataclasses import dataclass, field
from enum import Enum

from cluster.spec.ids import Peer
from cluster.spec.kv import PoolLayout
from cluster.spec.messages import Submit
from cluster.spec.ranks import coords_of, world_size
from cluster.spec.registry import RankRow, SendTimes
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import Destination, SendReport
from cluster.spec.tiers import CachedTokens
from cluster.spec.transfer_messages import Drained, Refused, Result, Revoke, Ticket
from transfer.page_assignment import PageShare, receivers
from workers.cache.page_lists import PageLists, live_pages

TICKET_TIMEOUT_S = 30.0
"""Seconds that a ticket waits for its request. The router submits to both replicas at once, so a later request was
lost.
"""


class PrefillState(Enum):
    QUEUED = "queued"
    """Queued without a ticket; holds no pages."""
    SCHEDULED = "scheduled"
    """Ticketed; the step scheduler computes it and ranks send finished chunks."""
    SENDING = "sending"
    """Computed, Result sent; pages are held until every rank has sent its part."""
    STOPPING = "stopping"
    """Failed or revoked; pages are held until every rank has stopped."""
    ENDED = "ended"
    """Ended; holds no pages."""


MOVES = {
    PrefillState.QUEUED: frozenset({PrefillState.SCHEDULED, PrefillState.ENDED}),
    PrefillState.SCHEDULED: frozenset({PrefillState.SENDING, PrefillState.STOPPING}),
    PrefillState.SENDING: frozenset({PrefillState.STOPPING, PrefillState.ENDED}),
    PrefillState.STOPPING: frozenset({PrefillState.ENDED}),
    PrefillState.ENDED: frozenset[PrefillState](),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSettings:
    """Facts about its replica that a leader needs."""

    me: Peer
    row: RankRow
    """First rank record of our DP rank; it answers for the whole replica."""
    rank_addresses: tuple[str, ...]
    """Channel addresses of all ranks of our DP rank, by global rank."""
    ticket_timeout_s: float = TICKET_TIMEOUT_S
    settle_s: float
    """Maximum time that the backend may still move bytes after a failed write."""

    @property
    def layout(self) -> PoolLayout:
        """Return the pool layout of every rank."""
        return self.row.layout


@dataclass(slots=True)
class PrefillRequest:
    """One request in prefill."""

    submit: Submit
    arrived_s: float
    scheduled_s: float = 0.0
    """Time at which its ticket and decode's rank records were available."""
    state: PrefillState = PrefillState.QUEUED
    ticket: Ticket | None = None
    pages: PageLists = field(default_factory=list)
    """Pages while SENDING or STOPPING; before that the step scheduler holds them."""
    page_keys: list[bytes] = field(default_factory=list)
    """Keys of the full pages to cache when the request ends; empty until the prompt is computed."""
    reported: set[int] = field(default_factory=set)
    """Global ranks that will not write for it again."""
    quiet_at_s: float = 0.0
    """Time after which no bytes of a failed write can be in flight."""
    stop_reason: str = ""
    revoked: bool = False
    """Whether decode waits for Drained."""


def result_of(
    settings: PrefillSettings,
    request: PrefillRequest,
    destination: Destination,
    first: Sampled,
    cached: CachedTokens,
    now_s: float,
) -> Result:
    """Return the Result: the first token, and the total number of bytes that the senders write."""
    assert request.ticket is not None
    row = settings.row
    coords = [coords_of(rank, row.sizes) for rank in range(world_size(row.sizes))]
    receivers_of = {
        rank: ranks
        for rank, at in enumerate(coords)
        if at.dp == row.coords.dp and (ranks := receivers(row.transfer_mode, at, row.sizes, destination.rows))
    }
    # CP ranks that hold the same heads and layers divide the pages.
    parts = {(coords[rank].tp, coords[rank].pp): ranks for rank, ranks in receivers_of.items()}
    return Result(
        room=request.submit.room,
        generation=request.ticket.generation,
        prefill=settings.me,
        decode_incarnation=request.ticket.decode.incarnation,
        token_ids=[first.token_id],
        is_last=first.is_last,
        logprobs=[first.logprobs] if first.logprobs is not None else [],
        prompt_logprobs=first.prompt_logprobs,
        cached=cached,
        bootstrap_s=request.scheduled_s - request.arrived_s,
        prefill_s=now_s - request.scheduled_s,
        senders=list(receivers_of),
        num_pages=sum(PageShare.of(part).count(live_pages(destination.pages)) for part in parts.values()),
        num_bytes=sum(
            row.layout.bytes_of(lifetime) * PageShare.of([row]).count(live_pages([pages]))
            for row in destination.rows
            for lifetime, pages in enumerate(destination.pages)
        ),
    )


def refused(me: Peer, ticket: Ticket, reason: str) -> Refused:
    """Return the refusal of a ticket: nothing more is written for it."""
    return Refused(
        room=ticket.room,
        generation=ticket.generation,
        prefill=me,
        decode_incarnation=ticket.decode.incarnation,
        reason=reason,
    )


def drained(me: Peer, asked: Revoke | Ticket) -> Drained:
    """Return the end of a ticket of this room and generation: nothing more is written for it."""
    return Drained(
        room=asked.room,
        generation=asked.generation,
        prefill=me,
        decode_incarnation=asked.decode.incarnation,
    )


class SendMeter:
    """Totals sent by the ranks of a replica, from their reports."""

    def __init__(self) -> None:
        self._by_rank: dict[int, SendTimes] = {}

    @property
    def times(self) -> tuple[SendTimes, ...]:
        """Return the totals by global rank."""
        return tuple(self._by_rank[rank] for rank in sorted(self._by_rank))

    def add(self, report: SendReport) -> None:
        """Add a rank's report of a finished transfer."""
        if not report.num_bytes:
            return
        rank = report.sender_rank
        before = self._by_rank.get(rank, SendTimes(global_rank=rank))
        self._by_rank[rank] = SendTimes(
            global_rank=rank,
            num_transfers=before.num_transfers + 1,
            num_bytes=before.num_bytes + report.num_bytes,
            write_s=before.write_s + report.write_s,
        )
