"""Messages between the router and leaders, and the union of all messages. MessagePack on the wire.

Every message about a request carries room and incarnation, so that a late or misdirected one can be dropped.
"""

from enum import StrEnum

from cluster.spec.clock import ClockReading, Interval
from cluster.spec.ids import Incarnation, Peer, ReplicaId, Room
from cluster.spec.phases import PhaseTimes
from cluster.spec.registry import TableSnapshot
from cluster.spec.sampling import FinishReason, Sampling, Stopping, TokenLogprobs
from cluster.spec.step_messages import (
    CancelSend,
    ForgetPeer,
    ReportTrace,
    SendReport,
    Shutdown,
    StepPlan,
    StepResult,
    StepWork,
)
from cluster.spec.tiers import CachedTokens, FlushCache, PinPages, Tier, TierJob, TierJobResult, UseStorage
from cluster.spec.transfer_messages import (
    Accepted,
    CheckPages,
    Done,
    Drained,
    PagesChecked,
    Refused,
    Result,
    Revoke,
    Ticket,
)
from cluster.spec.wire import Tagged, TokenIds

INQUIRE_EVERY_S = 5.0
"""Interval at which a process asks about rooms whose messages may have been lost."""


class Submit(Tagged, frozen=True):
    """One attempt of one request; the prefill and the decode leader get the same message."""

    room: Room
    prompt_ids: TokenIds
    sampling: Sampling
    stopping: Stopping
    prefill: Peer | None
    """Replica that computes the prompt and hands off its KV; None if decode computes the uncached part."""
    decode: Peer
    router: Peer
    """Router that receives the outputs. If it ends, so does the request."""
    num_given: int = 0
    """Number of tokens at the end of ``prompt_ids`` that earlier attempts generated; they count as output."""
    prompt_of: Room | None = None
    """Room of the choice whose prompt pages this one shares: another of the same prompt, on the same decode replica."""
    cache_salt: str = ""
    """Salt of the page keys: only requests with the same salt share cached pages."""
    priority: int = 0
    """Priority; lower values run first. The oldest request makes progress whatever its priority."""
    tenant: str = ""
    """Name of the API key whose share of the replica the request uses."""
    weight: float = 1.0
    """Share of the request's tenant relative to other tenants; positive."""
    traced: bool = False
    """True if every rank keeps a trace of this request until asked for it."""
    dp_rank: int | None = None
    """Requested DP rank; ignored by a replica without such a rank."""


class Cancel(Tagged, frozen=True):
    """Instruction to stop working on an attempt: the client left, a stop string ended the answer, the other replica
    failed, or the deadline passed. Also answers an Inquire about an attempt that has ended.
    """

    room: Room
    incarnation: Incarnation


class Inquire(Tagged, frozen=True):
    """Query about rooms that may have ended, in case the message about their end was lost.

    For an unknown room, a decode leader answers a router with a Failure, and a router answers a leader with a Cancel.
    """

    rooms: list[Room]
    sender: Peer
    incarnation: Incarnation
    """Incarnation of the receiver."""


class SubscribeKvEvents(Tagged, frozen=True):
    """Subscription of a router to a replica's cached pages and their changes."""

    router: Peer
    incarnation: Incarnation
    """Incarnation of the receiver."""


class Output(Tagged, frozen=True):
    """Tokens of one request, in order."""

    room: Room
    replica: ReplicaId
    incarnation: Incarnation
    first_index: int
    """Output position of this message's first token; 0 is the first generated token."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    """Log-probabilities of every token in ``token_ids``; empty unless Sampling requests them."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Log-probabilities of all prompt tokens but the first, if requested; sent with the first output."""
    finish: FinishReason | None = None
    cached: CachedTokens = CachedTokens()
    """Cached tokens of the prompt; sent with the first output."""
    phases: PhaseTimes | None = None
    """Times by phase; sent with the first output, except for choices that share another one's prompt."""


class Outputs(Tagged, frozen=True):
    """One step's outputs for one router."""

    outputs: list[Output]


class Blame(StrEnum):
    """Replicas that may fail other requests for the same reason."""

    SENDER = "sender"
    BOTH = "both"
    """Both replicas, for example if a transfer between them failed."""
    NEITHER = "neither"
    """Neither replica, for example if a choice of the same prompt was cancelled."""
    MODEL = "model"
    """The model, whose logits were not finite."""


class Failure(Tagged, frozen=True):
    """Report that a replica cannot finish a request."""

    room: Room
    replica: ReplicaId
    incarnation: Incarnation
    reason: str
    """One sentence that names what failed."""
    retryable: bool
    blame: Blame = Blame.SENDER


class KvEvents(Tagged, frozen=True):
    """Pages that a replica's cache has stored and removed since the previous message."""

    replica: ReplicaId
    incarnation: Incarnation
    number: int
    """Sequence number; message 0 replaces everything known about the cache."""
    stored: list[bytes]
    """Keys of stored pages. A device page's prefix precedes it, in this message or in an earlier one."""
    removed: list[bytes]
    tier: Tier = Tier.DEVICE
    """Tier of the pages. For storage, a replica reports only the pages it stored itself."""


class RankTrace(Tagged, frozen=True):
    """Trace of one request on one rank."""

    room: Room
    replica: ReplicaId
    global_rank: int
    clock: ClockReading
    intervals: list[Interval]
    num_left_out: int
    """Number of intervals left out because the rank had reached its limit."""


class TableUpdate(Tagged, frozen=True):
    """New bootstrap table, from the process's own watcher."""

    snapshot: TableSnapshot


class Drain(Tagged, frozen=True):
    """Start draining: a replica still accepts and finishes requests that reach it, and a router refuses new ones."""


class Resume(Tagged, frozen=True):
    """Stop draining."""


class CheckHealth(Tagged, frozen=True):
    """Question of the driver whether a router's event loop runs."""

    reply_to: str
    """Address of the inbox for the answer."""


class Healthy(Tagged, frozen=True):
    """Answer of a router to CheckHealth."""


Wanted = Drain | Resume | FlushCache | PinPages | UseStorage
"""Idempotent administrator commands to a replica."""


class Command(Tagged, frozen=True):
    """Administrator's command, repeated until the response arrives."""

    number: int
    """Sequence number within a router's incarnation; a replica ignores commands older than the newest."""
    sender: Peer
    incarnation: Incarnation
    """Incarnation of the receiver."""
    wanted: Wanted


class CommandResult(Tagged, frozen=True):
    number: int
    replica: ReplicaId
    incarnation: Incarnation
    refusal: str = ""
    """Reason for a refusal; empty if the command was carried out."""
    num_pinned: int = 0
    """Number of the command's pages that are pinned in host memory."""


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
    | Accepted
    | Drained
    | StepPlan
    | CancelSend
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
    | Wanted
    | Command
    | CommandResult
    | TableUpdate
    | CheckHealth
    | Healthy
)
