"""Everything that processes say to each other, grouped by receiver. Plain data, frozen, MessagePack on the wire.

Room, generation and incarnation travel on every message that concerns pages, so that a late or foreign one
can be told apart and dropped.
"""

from collections.abc import Mapping
from enum import IntEnum

import msgspec

from cluster.spec.ids import Incarnation, ReplicaId, Room
from cluster.spec.kv import KvGeometry
from cluster.spec.registry import RankRow, TableSnapshot
from cluster.spec.sampling import FinishReason, Sampled, Sampling, Stopping, TokenLogprobs
from cluster.spec.strategy import Passing, Strategy
from cluster.spec.tiers import CachedTokens, FlushCache, MovePages, PagesMoved, PinPages, Tier, UseStorage
from cluster.spec.timeline import ClockReading, Interval


class _Struct(msgspec.Struct, frozen=True, kw_only=True):
    """Frozen, keyword-only."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A struct that may stand alone on the wire; its class name is its tag."""


# ---- parts of messages


class Peer(_Struct, frozen=True):
    """A replica, or a router, as seen from outside: who it is, which start of it, and where it listens."""

    replica: ReplicaId
    incarnation: Incarnation
    address: str
    """Channel address; of a replica its leader's."""


class PhaseTimes(_Struct, frozen=True):
    """How long one request took in each phase up to its first token, by the clocks of its replicas."""

    prefill: ReplicaId | None
    """None where decode computed the prompt itself."""
    decode: ReplicaId
    decode_queue_s: float
    """Until decode had pages for it."""
    prefill_s: float
    """From the ticket to the first token, turns of other requests included."""
    bootstrap_s: float = 0.0
    """In prefill, until its ticket had come and decode's ranks were known; most of it beside ``decode_queue_s``."""
    transfer_s: float = 0.0
    """From the first token until all KV was in decode: what of the transfer no computation hid."""


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


# ---- to a replica's leader, from the router


class Submit(_Message, frozen=True):
    """One attempt of one request; both legs get the same, if it has both."""

    room: Room
    prompt_ids: list[int]
    sampling: Sampling
    stopping: Stopping
    prefill: Peer | None
    """Computes the prompt and hands it over; None where decode computes what it does not have."""
    decode: Peer
    router: Peer
    """Gets the outputs; when it is gone, nobody waits for them."""
    num_given: int = 0
    """The last so many of ``prompt_ids`` are output that the client has from earlier attempts, and count as output."""
    prompt_of: Room | None = None
    """Another choice of the same prompt on the same decode replica; this one reads its pages once they are there."""
    cache_salt: str = ""
    """Only requests with the same salt share cached pages."""
    priority: int = 0
    """Lower values are computed earlier; the oldest request has its share whatever its priority."""
    timed: bool = False
    """Every rank keeps a timeline of this request until it is asked for it."""
    dp_rank: int | None = None
    """The DP rank that is to compute it, on each side that has one of this number."""


class Cancel(_Message, frozen=True):
    """The client left, the other leg failed, or the deadline passed."""

    room: Room
    incarnation: Incarnation


class FollowPages(_Message, frozen=True):
    """Tell this router which pages are cached, and from now on what changes."""

    router: Peer
    incarnation: Incarnation
    """Of the replica that is asked."""


# ---- to the router


class Output(_Message, frozen=True):
    """Tokens of one request, in order."""

    room: Room
    replica: ReplicaId
    incarnation: Incarnation
    first_index: int
    """Output position of the first token here; 0 is the first generated token."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    """Of every token here; empty where Sampling does not ask for them."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Of every token of the prompt but the first, where Sampling asks for them; told with the first output."""
    finish: FinishReason | None = None
    cached: CachedTokens = CachedTokens()
    """Told with the first output."""
    phases: PhaseTimes | None = None
    """Told with the first output, but not of choices that share another one's prompt."""


class Outputs(_Message, frozen=True):
    """What one step gave, for one router."""

    outputs: list[Output]


class Failure(_Message, frozen=True):
    """The leg cannot finish the request."""

    room: Room
    replica: ReplicaId
    incarnation: Incarnation
    reason: str
    """One sentence that names what failed."""
    retryable: bool
    """Another attempt may succeed."""
    mutual: bool = False
    """It may be the other leg's fault as well, such as where pages did not get from one to the other."""


class PageNews(_Message, frozen=True):
    """What a replica's cache has gained and lost since the news before."""

    replica: ReplicaId
    incarnation: Incarnation
    number: int
    """Counts up; number 0 begins anew, with nothing cached before it."""
    stored: list[bytes]
    """Page keys. Every page on the device has those above it, here or in earlier news."""
    removed: list[bytes]
    tier: Tier = Tier.DEVICE
    """Where; of storage only what this replica has stored is told."""


class Timeline(_Message, frozen=True):
    """What one rank did for a timed request."""

    room: Room
    replica: ReplicaId
    incarnation: Incarnation
    global_rank: int
    clock: ClockReading
    intervals: list[Interval]
    """In order of ending."""
    num_left_out: int
    """Intervals beyond the most that a rank keeps."""


# ---- to a prefill leader, from a decode leader


class Ticket(_Message, frozen=True):
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


class Revoke(_Message, frozen=True):
    """Stop writing for this ticket and say when that is sure."""

    room: Room
    generation: int
    decode: Peer
    prefill_incarnation: Incarnation


# ---- to a decode leader, from prefill


class Refused(_Message, frozen=True):
    """The ticket will not be used: the pair does not fit, or the request failed. Nothing more is written."""

    room: Room
    generation: int
    prefill: Peer
    decode_incarnation: Incarnation
    reason: str


class Result(_Message, frozen=True):
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


class PageDigests(_Struct, frozen=True):
    """What one sender wrote into the pool of one decode rank, page by page."""

    rank: int
    """Global rank of the decode rank."""
    spans: list[tuple[int, int]]
    """Offset and length of what was written in each page, in bytes."""
    pages: list[int]
    """By their ids in decode."""
    digests: list[bytes]
    """Of each page."""


class Done(_Message, frozen=True):
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


class Drained(_Message, frozen=True):
    """No rank of this prefill replica writes, or will write, for this generation."""

    room: Room
    generation: int
    prefill: Peer
    decode_incarnation: Incarnation


# ---- to the followers of a replica, from its leader


class Target(_Struct, frozen=True):
    """Where the pages of one request go: a ticket, as the sender ranks need it."""

    generation: int
    decode: Peer
    rows: list[RankRow]
    """The decode ranks, by global rank: endpoints and layouts of their pools."""
    num_tokens: int
    """Those whose KV goes there: the prompt, and output of earlier attempts."""
    pages: list[int]
    held_pages: int


class Admit(_Struct, frozen=True):
    """A request that the following steps will name by its room only."""

    room: Room
    prompt_len: int
    owner_base: int
    """Part that owns page 0 when pages are divided over the CP ranks."""
    sampling: Sampling
    target: Target | None
    """None where KV stays on this replica."""
    history: list[int] = []
    """Prompt and output so far; given only where sampling looks back."""
    timed: bool = False


class Row(_Struct, frozen=True):
    """One request's part of a step."""

    room: Room
    first_position: int
    """Tokens of this request that already have KV."""
    token_ids: list[int]
    new_pages: list[int]
    """Pages added to the request's page table before this step."""
    samples: bool
    """The last token's logits give an output token."""
    output_position: int
    """Index of that output token in the request's output."""
    targets: list[int] = []
    """Tokens of the prompt that follow those here, where their log-probabilities are asked for."""


class HostCopy(_Struct, frozen=True):
    """Pages of one request and as many slots in host memory, one copied to the other."""

    room: Room
    pages: list[int]
    slots: list[int]


class StepPlan(_Message, frozen=True):
    """One step of the whole replica: the leader decides, followers obey."""

    step: int
    strategy: Strategy
    admits: list[Admit]
    rows: list[Row]
    releases: list[Room]
    """Requests to forget before this step."""
    saves: list[HostCopy] = []
    """Copies from pages to slots, before anything of this step is written to the pages."""
    loads: list[HostCopy] = []
    """Copies from slots to pages, after those."""
    arrived: list[int] = []
    """Pages that prefill has written since the last plan; on a GPU they come in before anything else."""
    estimate_s: float | None = None
    """How long the step is expected to take; None where the strategy was not chosen by time."""
    passing: Passing | None = None
    """How queries meet keys where KV is sharded; None where it is replicated."""
    shard_lens: list[int] = []
    """Tokens of every attention shard, by dp * cp_size + cp; empty where dp is 1."""
    last_shard_lens: list[int] = []
    """The same in the last layer."""


class DropSend(_Message, frozen=True):
    """Write nothing more for this room, then report."""

    room: Room
    generation: int


class CheckPages(_Message, frozen=True):
    """Compare pages of your pool with what their senders told of them."""

    room: Room
    told: list[PageDigests]


class GiveTimeline(_Message, frozen=True):
    """From the router to every rank: send what you keep of a timed request, and forget it."""

    room: Room
    reply_to: str


class Shutdown(_Message, frozen=True):
    """Leave the loop."""

    reason: str


# ---- to a leader, from its ranks


class StepResult(_Message, frozen=True):
    """A step is computed; from the rank that draws tokens, where that is not the leader itself."""

    step: int
    dp_rank: int
    sampled: Mapping[Room, Sampled]


class SendReport(_Message, frozen=True):
    """One rank's state of one room's transfer changed."""

    room: Room
    generation: int
    sender_rank: int
    state: SendState
    reason: str = ""
    num_bytes: int = 0
    """That this rank wrote, and how long that took."""
    write_s: float = 0.0


class PagesChecked(_Message, frozen=True):
    """One rank's answer to CheckPages."""

    room: Room
    rank: int
    wrong: list[int]
    """Pages that do not hold what was sent."""


class TableUpdate(_Message, frozen=True):
    """The bootstrap table changed; from the process's own watcher."""

    snapshot: TableSnapshot


class Drain(_Message, frozen=True):
    """A replica asks for no new requests and finishes those it gets; a router takes none."""


class Resume(_Message, frozen=True):
    """Ask for new requests again."""


Message = (
    Submit
    | Cancel
    | Output
    | Outputs
    | Failure
    | FollowPages
    | PageNews
    | Timeline
    | Ticket
    | Revoke
    | Refused
    | Result
    | Done
    | Drained
    | StepPlan
    | DropSend
    | CheckPages
    | GiveTimeline
    | MovePages
    | StepResult
    | SendReport
    | PagesChecked
    | PagesMoved
    | Shutdown
    | Drain
    | Resume
    | FlushCache
    | PinPages
    | UseStorage
    | TableUpdate
)
