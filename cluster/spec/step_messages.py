"""What a leader and the ranks of its replica say to each other."""

from collections.abc import Mapping

from cluster.spec.ids import Incarnation, ReplicaId, Room
from cluster.spec.peer import Peer
from cluster.spec.registry import RankRow
from cluster.spec.sampling import Sampled, Sampling
from cluster.spec.strategy import Passing, Strategy
from cluster.spec.tiers import MovePages
from cluster.spec.transfer_messages import SendState
from cluster.spec.wire import Struct, Tagged


class Target(Struct, frozen=True):
    """Where the pages of one request go: a ticket, as the sender ranks need it."""

    generation: int
    decode: Peer
    rows: list[RankRow]
    """The decode ranks, by global rank: endpoints and layouts of their pools."""
    num_tokens: int
    """Those whose KV goes there: the prompt, and output of earlier attempts."""
    pages: list[int]
    held_pages: int


class Admit(Struct, frozen=True):
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


class Row(Struct, frozen=True):
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
    follows: bool = False
    """The row is the one token that the step before draws for the request; what ``token_ids`` holds says nothing."""
    targets: list[int] = []
    """Tokens of the prompt that follow those here, where their log-probabilities are asked for."""


class HostCopy(Struct, frozen=True):
    """Pages of one request and as many slots in host memory, one copied to the other."""

    room: Room
    pages: list[int]
    slots: list[int]


class StepPlan(Tagged, frozen=True):
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
    """Pages that prefill has written since the last plan. Before anything else they come to where they are read: on a
    GPU, and to all ranks that hold the same heads."""
    fill: MovePages | None = None
    """Cached pages that the step's one row reads, and that come from host memory meanwhile, layer after layer."""
    estimate_s: float | None = None
    """How long the step is expected to take; None where the strategy was not chosen by time."""
    passing: Passing | None = None
    """How queries meet keys where KV is sharded; None where it is replicated."""
    shard_lens: list[int] = []
    """Tokens of every attention shard, by dp * cp_size + cp; empty where dp is 1."""
    last_shard_lens: list[int] = []
    """The same in the last layer."""
    is_decode: bool = False
    """Where dp is over 1: in the whole step every row is one token that is drawn from, and waits for no pages."""


class DropSend(Tagged, frozen=True):
    """Write nothing more for this room, then report."""

    room: Room
    generation: int


class ForgetPeer(Tagged, frozen=True):
    """This start of a decode replica, and all before it, are proven gone: keep nothing of their memory open."""

    replica: ReplicaId
    incarnation: Incarnation


class GiveTimeline(Tagged, frozen=True):
    """From the router to every rank: send what you keep of a timed request, and forget it."""

    room: Room
    reply_to: str


class Shutdown(Tagged, frozen=True):
    """Leave the loop."""

    reason: str


class StepResult(Tagged, frozen=True):
    """A step is computed; from the rank that draws tokens, where that is not the leader itself."""

    step: int
    dp_rank: int
    sampled: Mapping[Room, Sampled]


class StepWork(Tagged, frozen=True):
    """What one rank has computed since it began to take requests."""

    global_rank: int
    num_steps: int
    step_s: float
    """Time of all these steps, waiting for other ranks in them included."""
    expert_tokens: Mapping[int, int] = {}
    """By the model's expert, over all of the rank's layers."""
    dropped: Mapping[str, int] = {}
    """What was kept out of its inbox, by reason; the leader knows that of its own."""


class SendReport(Tagged, frozen=True):
    """One rank's state of one room's transfer changed."""

    room: Room
    generation: int
    sender_rank: int
    state: SendState
    reason: str = ""
    num_bytes: int = 0
    """That this rank wrote, and how long that took."""
    write_s: float = 0.0
