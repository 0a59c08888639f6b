"""Messages between the router and leaders, and the union of all messages. MessagePack on the wire.

Room and incarnation are part of every message that concerns a request, so that a late or misdirected one is recognized
and dropped.
"""

from enum import StrEnum

from cluster.spec.clock import ClockReading, Interval
from cluster.spec.ids import Incarnation, Peer, ReplicaId, Room
from cluster.spec.registry import TableSnapshot
from cluster.spec.sampling import FinishReason, Sampling, Stopping, TokenLogprobs
from cluster.spec.step_messages import (
    DropSend,
    ForgetPeer,
    ReportTrace,
    SendReport,
    Shutdown,
    StepPlan,
    StepResult,
    StepWork,
)
from cluster.spec.tiers import CachedTokens, FlushCache, PinPages, Tier, TierJob, TierJobResult, UseStorage
from cluster.spec.transfer_messages import CheckPages, Done, Drained, PagesChecked, Refused, Result, Revoke, Ticket
from cluster.spec.wire import Struct, Tagged, TokenIds

INQUIRE_EVERY_S = 5.0
"""Interval between checks of state that may wait for a lost message."""


class PhaseTimes(Struct, frozen=True):
    """Time of one request in each phase up to its first token, by the clocks of its replicas."""

    prefill: ReplicaId | None
    """Prefill replica; None if decode computed the prompt itself."""
    decode: ReplicaId
    decode_queue_s: float
    """Time until decode had pages for the request."""
    prefill_s: float
    """Time from the ticket to the first token, including other requests' steps."""
    bootstrap_s: float = 0.0
    """Time in prefill until the ticket had come and decode's ranks were known; most of it overlaps
    ``decode_queue_s``.
    """
    transfer_s: float = 0.0
    """Time from the first token until all KV was in decode: the part of the transfer that no computation hid."""


class Submit(Tagged, frozen=True):
    """One attempt of one request; both targets get the same message, if there are two."""

    room: Room
    prompt_ids: TokenIds
    sampling: Sampling
    stopping: Stopping
    prefill: Peer | None
    """Replica that computes the prompt and hands it over; None if decode computes what it does not have."""
    decode: Peer
    router: Peer
    """Receiver of the outputs; once it is gone, nobody waits for them."""
    num_given: int = 0
    """Number of tokens at the end of ``prompt_ids`` that are output of earlier attempts, and count as output."""
    prompt_of: Room | None = None
    """Room of another choice of the same prompt on the same decode replica; this one reads its pages once they are
    there.
    """
    cache_salt: str = ""
    """Salt of the page keys: only requests with the same salt share cached pages."""
    priority: int = 0
    """Priority; lower values are computed earlier. The oldest request gets its share whatever its priority."""
    traced: bool = False
    """True if every rank keeps a trace of this request until it is asked for it."""
    dp_rank: int | None = None
    """Requested DP rank, on each side that has one of this number."""


class Cancel(Tagged, frozen=True):
    """Cancellation: the client left, the other target failed, or the deadline passed."""

    room: Room
    incarnation: Incarnation


class Inquire(Tagged, frozen=True):
    """Query for rooms that the receiver does not have: the message that would have said so may have been lost.

    A decode leader responds to a router with a Failure, a router responds to a leader with a Cancel.
    """

    rooms: list[Room]
    """Rooms that the sender has."""
    sender: Peer
    incarnation: Incarnation
    """Incarnation of the receiver."""


class SubscribeKvEvents(Tagged, frozen=True):
    """Subscription of a router to the replica's cached pages and every later change."""

    router: Peer
    incarnation: Incarnation
    """Incarnation of the receiver."""


class Output(Tagged, frozen=True):
    """Tokens of one request, in order."""

    room: Room
    replica: ReplicaId
    incarnation: Incarnation
    first_index: int
    """Output position of the first token here; 0 is the first generated token."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    """Log-probabilities of every token here; empty unless Sampling asks for them."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Log-probabilities of every token of the prompt but the first, if Sampling asks for them; sent with the first
    output.
    """
    finish: FinishReason | None = None
    cached: CachedTokens = CachedTokens()
    """Cached tokens of the prompt; sent with the first output."""
    phases: PhaseTimes | None = None
    """Times by phase; sent with the first output, but not for choices that share another one's prompt."""


class Outputs(Tagged, frozen=True):
    """Outputs of one step for one router."""

    outputs: list[Output]


class Blame(StrEnum):
    """Targets of a request that may fail another one for the same reason."""

    SENDER = "sender"
    BOTH = "both"
    """Both, as when pages did not get from one to the other."""
    NEITHER = "neither"
    """Neither, as when a choice of the same prompt was cancelled."""


class Failure(Tagged, frozen=True):
    """Report that the target cannot finish the request."""

    room: Room
    replica: ReplicaId
    incarnation: Incarnation
    reason: str
    """Reason in one sentence that names what failed."""
    retryable: bool
    """True if another attempt may succeed."""
    blame: Blame = Blame.SENDER


class KvEvents(Tagged, frozen=True):
    """Pages that a replica's cache has gained and lost since the previous message."""

    replica: ReplicaId
    incarnation: Incarnation
    number: int
    """Sequence number; number 0 starts anew, with nothing cached before it."""
    stored: list[bytes]
    """Keys of stored pages. Every page on the device has those above it, here or in an earlier message."""
    removed: list[bytes]
    tier: Tier = Tier.DEVICE
    """Tier of the pages; for storage, only what this replica has stored is reported."""


class RankTrace(Tagged, frozen=True):
    """Trace of one request on one rank."""

    room: Room
    replica: ReplicaId
    incarnation: Incarnation
    global_rank: int
    clock: ClockReading
    intervals: list[Interval]
    """Intervals in order of their ends."""
    num_left_out: int
    """Number of intervals beyond the limit of a rank."""


class TableUpdate(Tagged, frozen=True):
    """Change of the bootstrap table, from the process's own watcher."""

    snapshot: TableSnapshot


class Drain(Tagged, frozen=True):
    """Drain request: a replica finishes the requests it gets; a router takes none."""


class Resume(Tagged, frozen=True):
    """Ask for new requests again."""


Wanted = Drain | Resume | FlushCache | PinPages | UseStorage
"""Idempotent commands of an administrator to a replica."""


class Command(Tagged, frozen=True):
    """Administrator's command, repeated until the response arrives."""

    number: int
    """Sequence number within one start of a router; commands older than the newest have no effect."""
    sender: Peer
    incarnation: Incarnation
    """Incarnation of the receiver."""
    wanted: Wanted


class CommandResult(Tagged, frozen=True):
    """Response to a Command."""

    number: int
    replica: ReplicaId
    incarnation: Incarnation
    refusal: str = ""
    """Reason for a refusal; empty if the command was carried out."""
    num_pinned: int = 0
    """Number of the command's pages that are in host memory and stay there."""


Message = (
    Submit
    | Cancel
    | Inquire
    | Output
    | Outputs
    | Failure
    | SubscribeKvEvents
    | KvEvents
    | RankTrace
    | Ticket
    | Revoke
    | Refused
    | Result
    | Done
    | Drained
    | StepPlan
    | DropSend
    | ForgetPeer
    | CheckPages
    | ReportTrace
    | TierJob
    | StepResult
    | StepWork
    | SendReport
    | PagesChecked
    | TierJobResult
    | Shutdown
    | Drain
    | Resume
    | FlushCache
    | PinPages
    | UseStorage
    | Command
    | CommandResult
    | TableUpdate
)
