"""What prefill and decode leaders say to each other of a handoff, and decode to its ranks of what came.

Room, generation and incarnation travel on every one between replicas that concerns pages, so that a late or foreign one
can be told apart and dropped. Within a replica, whose ranks start and end as one at addresses of their own, the room is
enough.
"""

from enum import IntEnum

from cluster.spec.ids import Incarnation, Room
from cluster.spec.kv import KvGeometry
from cluster.spec.peer import Peer
from cluster.spec.sampling import TokenLogprobs
from cluster.spec.tiers import CachedTokens
from cluster.spec.wire import Struct, Tagged


class SendState(IntEnum):
    """What one sender rank knows of one room's transfer; the leader folds its ranks by minimum."""

    FAILED = 0
    """A write failed; final."""
    SENDING = 1
    """Writes may still happen."""
    DRAINED = 2
    """Stopped early; this rank will not write again for this generation."""
    SENT = 3
    """Everything was written and acknowledged by the transport."""


class Ticket(Tagged, frozen=True):
    """Decode's permission to write the given pages."""

    room: Room
    generation: int
    decode: Peer
    prefill_incarnation: Incarnation
    pages: list[list[int]]
    """Page ids per KV group, for the tokens after the held ones."""
    held_pages: int
    """Leading pages of the prompt that decode already has."""
    geometry: KvGeometry
    dp_rank: int = 0
    """Whose pages they are."""
    wanted_dp_rank: int | None = None
    """As in the Submit."""


class Revoke(Tagged, frozen=True):
    """Stop writing for this ticket and say when that is sure."""

    room: Room
    generation: int
    decode: Peer
    prefill_incarnation: Incarnation


class Refused(Tagged, frozen=True):
    """The ticket will not be used: the pair does not fit, or the request failed. Nothing more is written."""

    room: Room
    generation: int
    prefill: Peer
    decode_incarnation: Incarnation
    reason: str


class Result(Tagged, frozen=True):
    """What the forward pass gave; sent once by the prefill leader."""

    room: Room
    generation: int
    prefill: Peer
    decode_incarnation: Incarnation
    token_ids: list[int]
    """First token of each choice."""
    senders: list[int]
    """Global ranks whose Done must arrive."""
    num_pages: int
    """Pages of the ticket that were filled, over all KV groups; each once for every rank that sends a part of it."""
    num_bytes: int
    """Bytes of KV that were written, over all senders."""
    is_last: bool = False
    """The request's grammar allows nothing after it."""
    logprobs: list[TokenLogprobs] = []
    """Of every token here; empty where Sampling does not ask for them."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Of every token of the prompt but the first, where Sampling asks for them."""
    cached: CachedTokens = CachedTokens()
    """Tokens of the prompt that were not computed."""
    bootstrap_s: float = 0.0
    """See ``PhaseTimes``."""
    prefill_s: float = 0.0


class PageDigests(Struct, frozen=True):
    """What one sender wrote into the pool of one decode rank, page by page."""

    rank: int
    """Global rank of the decode rank."""
    spans: list[tuple[int, int]]
    """Offset and length of what was written in each page, in bytes."""
    pages: list[int]
    """By their ids in decode."""
    digests: list[bytes]
    """Of each page."""


class Done(Tagged, frozen=True):
    """One sender rank has written its part and the transport acknowledged it."""

    room: Room
    generation: int
    prefill: Peer
    decode_incarnation: Incarnation
    sender_rank: int
    num_pages: int
    num_bytes: int
    digests: list[PageDigests] = []
    """Of everything that was written, where `transfer.verify` asks for it."""


class Drained(Tagged, frozen=True):
    """No rank of this prefill replica writes, or will write, for this generation."""

    room: Room
    generation: int
    prefill: Peer
    decode_incarnation: Incarnation


class CheckPages(Tagged, frozen=True):
    """Compare pages of your pool with what their senders told of them."""

    room: Room
    told: list[PageDigests]


class PagesChecked(Tagged, frozen=True):
    """One rank's answer to CheckPages."""

    room: Room
    rank: int
    wrong: list[int]
    """Pages that do not hold what was sent."""
