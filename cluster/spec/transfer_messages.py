"""Messages between prefill and decode leaders about a handoff, and from decode to its ranks about arrived pages.

A room has one ticket. Messages between replicas that concern pages carry the room and incarnations, so that late and
misdirected ones are recognized and dropped. Within a replica, whose ranks start and end together, the room is enough.
"""

from enum import StrEnum

from cluster.spec.ids import Incarnation, Peer, Room
from cluster.spec.kv import KvGeometry
from cluster.spec.sampling import TokenLogprobs
from cluster.spec.tiers import CachedTokens
from cluster.spec.wire import Struct, Tagged


class SendState(StrEnum):
    """State of one transfer on one sender rank."""

    SENDING = "sending"
    """Finished pages are handed to the backend."""
    DRAINING = "draining"
    """Cancelled; a write that was handed out earlier may still run."""
    SENT = "sent"
    """Every page of this rank's part is written and acknowledged; final."""
    DRAINED = "drained"
    """Stopped early, and nothing runs any more; final."""
    FAILED = "failed"
    """A write failed, and nothing was handed out since; final."""


class Ticket(Tagged, frozen=True):
    """Decode's permission to write the given pages."""

    room: Room
    decode: Peer
    prefill_incarnation: Incarnation
    pages: list[list[int]]
    """Page ids by lifetime, for the tokens after the held ones; ``NO_PAGE`` where no later token sees them."""
    num_held_pages: int
    """Leading pages of the prompt that decode already has."""
    geometry: KvGeometry
    dp_rank: int = 0
    """DP rank that owns the pages."""
    wanted_dp_rank: int | None = None
    """DP rank that the Submit asks for."""


class Revoke(Tagged, frozen=True):
    """Request to stop writing for this ticket, and to confirm once that is certain."""

    room: Room
    decode: Peer
    prefill_incarnation: Incarnation


class Refused(Tagged, frozen=True):
    """Notice that the ticket will not be used: the pair does not fit, or the request failed. Nothing more is
    written.
    """

    room: Room
    prefill: Peer
    decode_incarnation: Incarnation
    reason: str


class Result(Tagged, frozen=True):
    """Outcome of the forward pass; sent once by the prefill leader."""

    room: Room
    prefill: Peer
    decode_incarnation: Incarnation
    token_ids: list[int]
    """First token of each choice."""
    senders: list[int]
    """Global ranks whose Done must arrive."""
    num_pages: int
    """Filled pages of the ticket, over all lifetimes; each counts once per rank that sends a part of it."""
    num_bytes: int
    """Written bytes of KV, over all senders."""
    is_last: bool = False
    """True if the request's grammar allows nothing after it."""
    logprobs: list[TokenLogprobs] = []
    """Log-probabilities of every token here; empty unless Sampling asks for them."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Log-probabilities of every token of the prompt but the first, if Sampling asks for them."""
    cached: CachedTokens = CachedTokens()
    """Tokens of the prompt that were not computed."""
    bootstrap_s: float = 0.0
    """Bootstrap time, as in ``PhaseTimes``."""
    prefill_s: float = 0.0


class PageDigests(Struct, frozen=True):
    """Digests of what one sender wrote into the pool of one decode rank, page by page."""

    rank: int
    """Global rank of the decode rank."""
    spans: list[tuple[int, int]]
    """Offset and length of the written bytes in each page."""
    pages: list[int]
    """Page ids in decode."""
    digests: list[bytes]
    """Digest of each page."""


class Done(Tagged, frozen=True):
    """Report that one sender rank has written its part and the transport acknowledged it."""

    room: Room
    prefill: Peer
    decode_incarnation: Incarnation
    sender_rank: int
    num_pages: int
    num_bytes: int
    digests: list[PageDigests] = []
    """Digests of everything that was written, if `transfer.verify` asks for it."""


class Drained(Tagged, frozen=True):
    """Confirmation that no rank of this prefill replica writes, or will write, for this room."""

    room: Room
    prefill: Peer
    decode_incarnation: Incarnation


class CheckPages(Tagged, frozen=True):
    """Request to compare pages of the rank's pool with their senders' digests."""

    room: Room
    digests: list[PageDigests]


class PagesChecked(Tagged, frozen=True):
    """One rank's response to CheckPages."""

    room: Room
    rank: int
    wrong: list[int]
    """Pages that differ from what was sent."""
