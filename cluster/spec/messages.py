"""What the router and leaders say to each other, and every message there is. MessagePack on the wire.

Room and incarnation travel on every one that concerns a request, so that a late or foreign one can be told apart
and dropped.
"""

from enum import StrEnum

from cluster.spec.ids import Incarnation, ReplicaId, Room
from cluster.spec.peer import Peer
from cluster.spec.registry import TableSnapshot
from cluster.spec.sampling import FinishReason, Sampling, Stopping, TokenLogprobs
from cluster.spec.step_messages import (
    DropSend,
    ForgetPeer,
    GiveTimeline,
    SendReport,
    Shutdown,
    StepPlan,
    StepResult,
    StepWork,
)
from cluster.spec.tiers import CachedTokens, FlushCache, PinPages, Tier, TierJob, TierJobResult, UseStorage
from cluster.spec.timeline import ClockReading, Interval
from cluster.spec.token_ids import TokenIds
from cluster.spec.transfer_messages import CheckPages, Done, Drained, PagesChecked, Refused, Result, Revoke, Ticket
from cluster.spec.wire import Struct, Tagged

INQUIRE_EVERY_S = 5.0
"""Between two looks at what may wait for a message that was lost."""


class PhaseTimes(Struct, frozen=True):
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


class Submit(Tagged, frozen=True):
    """One attempt of one request; both legs get the same, if it has both."""

    room: Room
    prompt_ids: TokenIds
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


class Cancel(Tagged, frozen=True):
    """The client left, the other leg failed, or the deadline passed."""

    room: Room
    incarnation: Incarnation


class Inquire(Tagged, frozen=True):
    """Say which of these rooms you do not have: the message that would have told so may have been lost.

    A decode leader answers a router with a Failure, a router answers a leader with a Cancel.
    """

    rooms: list[Room]
    """That the sender has."""
    sender: Peer
    incarnation: Incarnation
    """Of who is asked."""


class FollowPages(Tagged, frozen=True):
    """Tell this router which pages are cached, and from now on what changes."""

    router: Peer
    incarnation: Incarnation
    """Of the replica that is asked."""


class Output(Tagged, frozen=True):
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


class Outputs(Tagged, frozen=True):
    """What one step gave, for one router."""

    outputs: list[Output]


class Blame(StrEnum):
    """Which legs of a request may well fail another one for the same reason."""

    SENDER = "sender"
    BOTH = "both"
    """Such as where pages did not get from one to the other."""
    NEITHER = "neither"
    """Such as where a choice of the same prompt was cancelled."""


class Failure(Tagged, frozen=True):
    """The leg cannot finish the request."""

    room: Room
    replica: ReplicaId
    incarnation: Incarnation
    reason: str
    """One sentence that names what failed."""
    retryable: bool
    """Another attempt may succeed."""
    blame: Blame = Blame.SENDER


class PageNews(Tagged, frozen=True):
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


class Timeline(Tagged, frozen=True):
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


class TableUpdate(Tagged, frozen=True):
    """The bootstrap table changed; from the process's own watcher."""

    snapshot: TableSnapshot


class Drain(Tagged, frozen=True):
    """A replica asks for no new requests and finishes those it gets; a router takes none."""


class Resume(Tagged, frozen=True):
    """Ask for new requests again."""


Wanted = Drain | Resume | FlushCache | PinPages | UseStorage
"""What an administrator may want of a replica; to do it twice is to do it once."""


class Command(Tagged, frozen=True):
    """Do what an administrator wants, and answer; told again until the answer comes."""

    number: int
    """Counts up with those of one start of a router: an older one than the newest changes nothing."""
    sender: Peer
    incarnation: Incarnation
    """Of the replica that is told."""
    wanted: Wanted


class CommandTaken(Tagged, frozen=True):
    """The answer to a Command."""

    number: int
    replica: ReplicaId
    incarnation: Incarnation
    refusal: str = ""
    """Why it is not done; empty if it is."""
    num_pinned: int = 0
    """Of the pages that the command names, those in host memory that stay there."""


Message = (
    Submit
    | Cancel
    | Inquire
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
    | ForgetPeer
    | CheckPages
    | GiveTimeline
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
    | CommandTaken
    | TableUpdate
)
