"""Request in a prefill leader: its states, the messages that end its ticket, and totals of what its ranks send."""

from dataclasses import dataclass, field
from enum import Enum

from cluster.spec.clock import ClockReading
from cluster.spec.ids import Peer
from cluster.spec.phases import SAME_MACHINE, PromptTimes
from cluster.spec.ranks import coords_of, world_size
from cluster.spec.registry import RankRecord, SendTimes
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import SendReport
from cluster.spec.transfer_messages import Accepted, Drained, Result, Revoke, Ticket
from transfer.page_assignment import PageShare, receivers
from workers.cache.lifetimes import live_pages
from workers.scheduler.sequence import TokenSequence

TICKET_TIMEOUT_S = 30.0
"""Maximum time that a ticket waits for its request, which the router sends at the same time as decode's."""


class PrefillState(Enum):
    QUEUED = "queued"
    """Waiting for a ticket, decode's records, or pages from storage. Holds no pages."""
    SCHEDULED = "scheduled"
    """Passed to the step scheduler, with a ticket. Ranks send the pages of each computed chunk."""
    SENDING = "sending"
    """Computed, and the Result has been sent. Pages are held until every rank has sent its part."""
    STOPPING = "stopping"
    """Failed, cancelled or revoked. Pages are held until every rank has stopped sending."""
    ENDED = "ended"
    """Ended. Holds no pages."""


MOVES = {
    PrefillState.QUEUED: frozenset({PrefillState.SCHEDULED, PrefillState.ENDED}),
    PrefillState.SCHEDULED: frozenset({PrefillState.SENDING, PrefillState.STOPPING}),
    PrefillState.SENDING: frozenset({PrefillState.STOPPING, PrefillState.ENDED}),
    PrefillState.STOPPING: frozenset({PrefillState.ENDED}),
    PrefillState.ENDED: frozenset[PrefillState](),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSettings:
    """Properties of a prefill replica."""

    me: Peer
    record: RankRecord
    """Record of the DP rank's first rank. All ranks have the same layout."""
    rank_addresses: tuple[str, ...]
    """Channel addresses of the DP rank's ranks, ordered by global rank."""
    ticket_timeout_s: float = TICKET_TIMEOUT_S
    settle_s: float
    """Maximum time for which the backend may still move bytes after a failed write."""
    clock: ClockReading = SAME_MACHINE


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillRequest(TokenSequence):
    """Request in a prefill leader. While SENDING or STOPPING it has pages, but is not in the step scheduler."""

    stored_s: float = 0.0
    """Time at which the request waited for nothing but pages from storage."""
    scheduled_s: float = 0.0
    """Time at which the request entered SCHEDULED."""
    state: PrefillState = PrefillState.QUEUED
    ticket: Ticket | None = None
    is_computed: bool = False
    reported: set[int] = field(default_factory=set)
    """Global ranks that will not write for this request again."""
    quiet_at_s: float = 0.0
    """Time after which no bytes of a failed write can be in flight."""
    stop_reason: str = ""
    is_revoked: bool = False
    """True if decode waits for a Drained message."""


def result_of(settings: PrefillSettings, request: PrefillRequest, first: Sampled) -> Result:
    """Return the Result: the first token, and the total numbers of pages and bytes that the ranks send."""
    record, destination = settings.record, request.destination
    assert destination is not None
    coords = [coords_of(rank, record.sizes) for rank in range(world_size(record.sizes))]
    receivers_of = {
        rank: ranks
        for rank, at in enumerate(coords)
        if at.dp == record.coords.dp and (ranks := receivers(record.transfer_mode, at, record.sizes, destination.ranks))
    }
    # CP ranks that hold the same heads and layers divide the pages among themselves.
    parts = {(coords[rank].tp, coords[rank].pp): ranks for rank, ranks in receivers_of.items()}
    return Result(
        room=request.room,
        prefill=settings.me,
        decode_incarnation=destination.decode.incarnation,
        token_ids=[first.token_id],
        completes_grammar=first.completes_grammar,
        logprobs=[first.logprobs] if first.logprobs is not None else [],
        prompt_logprobs=first.prompt_logprobs,
        cached=request.kv.cached,
        times=PromptTimes(
            replica=settings.me.replica,
            clock=settings.clock,
            stored_s=request.stored_s,
            scheduled_s=request.scheduled_s,
            steps=request.steps,
        ),
        senders=list(receivers_of),
        num_pages=sum(PageShare.of(part).count(live_pages(destination.pages)) for part in parts.values()),
        num_bytes=sum(
            record.layout.bytes_of(lifetime) * PageShare.of([record]).count(live_pages([pages]))
            for record in destination.ranks
            for lifetime, pages in enumerate(destination.pages)
        ),
    )


def accepted(me: Peer, ticket: Ticket) -> Accepted:
    return Accepted(room=ticket.room, prefill=me, decode_incarnation=ticket.decode.incarnation)


def drained(me: Peer, asked: Revoke | Ticket) -> Drained:
    """Return the confirmation that nothing more will be written for a ticket."""
    return Drained(
        room=asked.room,
        prefill=me,
        decode_incarnation=asked.decode.incarnation,
    )


class SendMeter:
    """Totals of each rank's transfers, collected from the ranks' reports."""

    def __init__(self) -> None:
        self._by_rank: dict[int, SendTimes] = {}

    @property
    def times(self) -> tuple[SendTimes, ...]:
        return tuple(self._by_rank[rank] for rank in sorted(self._by_rank))

    def add(self, report: SendReport) -> None:
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
