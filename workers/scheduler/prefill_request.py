"""State of one request in a prefill leader, and its legal moves."""

from dataclasses import dataclass, field
from enum import Enum

from cluster.spec.kv import PoolLayout
from cluster.spec.messages import Submit
from cluster.spec.peer import Peer
from cluster.spec.registry import RankRow
from cluster.spec.transfer_messages import SendState, Ticket
from workers.cache.page_lists import PageLists


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
    """Ended; holds nothing."""


MOVES = {
    PrefillState.QUEUED: frozenset({PrefillState.SCHEDULED, PrefillState.ENDED}),
    PrefillState.SCHEDULED: frozenset({PrefillState.SENDING, PrefillState.STOPPING}),
    PrefillState.SENDING: frozenset({PrefillState.STOPPING, PrefillState.ENDED}),
    PrefillState.STOPPING: frozenset({PrefillState.ENDED}),
    PrefillState.ENDED: frozenset[PrefillState](),
}

TICKET_TIMEOUT_S = 30.0
"""Seconds that a ticket waits for its request. The router asks both replicas at once: only a lost one takes longer."""


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
    """Longest time that the backend may still move bytes of a failed write."""

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
    """Time at which its ticket and decode's ranks were there."""
    state: PrefillState = PrefillState.QUEUED
    ticket: Ticket | None = None
    pages: PageLists = field(default_factory=list)
    """Pages while SENDING or STOPPING; before that the step scheduler holds them."""
    page_keys: list[bytes] = field(default_factory=list)
    """Keys of the full pages that may be cached when the request ends; none until the prompt is computed."""
    reports: dict[int, SendState] = field(default_factory=dict)
    """Latest report of each rank, by global rank."""
    quiet_at_s: float = 0.0
    """Time after which no byte of a failed write can be in flight."""
    stop_reason: str = ""
    revoked: bool = False
    """Whether decode waits for Drained."""
