"""Messages between prefill and decode leaders about a handoff, and from decode to its ranks about received pages.

A room has one ticket. Messages between replicas that concern pages carry the room and incarnations, so that late and
misdirected ones are recognized and dropped. Within a replica, whose ranks start and end together, the room is enough.
"""

from enum import StrEnum

from cluster.spec.ids import Incarnation, Peer, Room
from cluster.spec.kv import KvGeometry
from cluster.spec.phases import PromptTimes
from cluster.spec.sampling import TokenLogprobs
from cluster.spec.tiers import CachedTokens
from cluster.spec.wire import Struct, Tagged


class SendState(StrEnum):
    """State of one transfer on one sender rank."""

    SENDING = "sending"
    """Completed pages are being written."""
    DRAINING = "draining"
    """Cancelled; an earlier write may still be in flight."""
    SENT = "sent"
    """All of this rank's pages are written and acknowledged; final."""
    DRAINED = "drained"
    """Stopped early, with no write in flight; final."""
    FAILED = "failed"
    """A write failed, and nothing was written after it; final."""


class Ticket(Tagged, frozen=True):
    """Decode's permission to write the given pages."""

    room: Room
    decode: Peer
    prefill_incarnation: Incarnation
    pages: list[list[int]]
    """Page ids by lifetime, after ``num_held_pages`` pages; ``NO_PAGE`` for pages that no later token sees."""
    num_held_pages: int
    """Number of leading prompt pages that decode already has."""
    geometry: KvGeometry
    dp_rank: int = 0
    """DP rank that owns the pages."""
    wanted_dp_rank: int | None = None
    """DP rank that the Submit requests."""


class Revoke(Tagged, frozen=True):
    """Request to stop writing for a ticket; confirmed by Drained."""

    room: Room
    decode: Peer
    prefill_incarnation: Incarnation


class Refused(Tagged, frozen=True):
    """Refusal of a ticket: the replicas do not match, or the request failed. Nothing more is written."""

    room: Room
    prefill: Peer
    decode_incarnation: Incarnation
    reason: str


class Accepted(Tagged, frozen=True):
    """Answer to a repeated ticket: prefill has it, and its request is queued, being computed, or being sent."""

    room: Room
    prefill: Peer
    decode_incarnation: Incarnation


class Result(Tagged, frozen=True):
    """Outcome of the forward pass; sent once by the prefill leader."""

    room: Room
    prefill: Peer
    decode_incarnation: Incarnation
    token_ids: list[int]
    """Token that prefill sampled: the first of the answer, or in a continuation the next one."""
    senders: list[int]
    """Global ranks whose Done must arrive."""
    num_pages: int
    """Number of written pages over all lifetimes. A page counts once for each rank that sends a part of it."""
    num_bytes: int
    """Bytes of KV written by all senders."""
    times: PromptTimes
    completes_grammar: bool = False
    """True if the grammar allows no further token, as in ``Sampled``."""
    logprobs: list[TokenLogprobs] = []
    """Log-probabilities of ``token_ids``; empty unless requested."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Log-probabilities of all prompt tokens except the first; empty unless requested."""
    cached: CachedTokens = CachedTokens()
    """Cached tokens of the prompt, which were not computed."""


class PageDigests(Struct, frozen=True):
    """Digests of the pages that one sender wrote into one decode rank's pool."""

    rank: int
    """Global rank of the decode rank."""
    spans: list[tuple[int, int]]
    """Offset and length of the written bytes in each page."""
    pages: list[int]
    """Page ids in decode."""
    digests: list[bytes]


class Done(Tagged, frozen=True):
    """Report that one sender rank has written its part and the transport has acknowledged it."""

    room: Room
    prefill: Peer
    decode_incarnation: Incarnation
    sender_rank: int
    num_pages: int
    num_bytes: int
    digests: list[PageDigests] = []
    """Digests of all written pages, if `transfer.verify` is `digest`."""


class Drained(Tagged, frozen=True):
    """Confirmation that no rank of this prefill replica will write for this room again."""

    room: Room
    prefill: Peer
    decode_incarnation: Incarnation


class CheckPages(Tagged, frozen=True):
    """Request to compare pages in a rank's pool with their senders' digests."""

    room: Room
    digests: list[PageDigests]


class PagesChecked(Tagged, frozen=True):
    """One rank's response to CheckPages."""

    room: Room
    rank: int
    wrong: list[int]
    """Pages whose bytes differ from those sent."""
