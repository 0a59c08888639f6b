"""Messages between a leader and the ranks of its replica."""

from collections.abc import Mapping

from cluster.spec.ids import Incarnation, ReplicaId, Room
from cluster.spec.peer import Peer
from cluster.spec.registry import RankRow
from cluster.spec.sampling import Sampled, Sampling
from cluster.spec.strategy import Passing, Strategy
from cluster.spec.tiers import TierJob
from cluster.spec.transfer_messages import SendState
from cluster.spec.wire import Struct, Tagged


class Target(Struct, frozen=True):
    """Where the pages of one request go: a ticket, as the sender ranks need it."""

    generation: int
    decode: Peer
    rows: list[RankRow]
    """The decode ranks, by global rank: endpoints and layouts of their pools."""
    num_tokens: int
    """Tokens whose KV goes there: the prompt, and output of earlier attempts."""
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


class ScheduledRequest(Struct, frozen=True):
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
    input_from_previous_step: bool = False
    """The one token here is what the step before samples for the request; ``token_ids`` holds a stand-in."""
    targets: list[int] = []
    """Tokens of the prompt that follow those here, where their log-probabilities are asked for."""


class StepPlan(Tagged, frozen=True):
    """One step of the whole replica: the leader decides, followers obey."""

    step: int
    strategy: Strategy
    admits: list[Admit]
    scheduled: list[ScheduledRequest]
    releases: list[Room]
    """Requests to forget before this step."""
    arrived: list[int] = []
    """Pages that prefill has written since the last plan. Before anything else they come to where they are read: on a
    GPU, and to all ranks that hold the same heads."""
    layerwise_load: TierJob | None = None
    """Cached pages that the step's one request reads, and that come from host memory meanwhile, layer by layer."""
    estimate_s: float | None = None
    """How long the step is expected to take; None where the strategy was not chosen by time."""
    passing: Passing | None = None
    """How queries meet keys where KV is sharded; None where it is replicated."""
    shard_lens: list[int] = []
    """Tokens of every attention shard, by dp * cp_size + cp; empty where dp is 1."""
    last_shard_lens: list[int] = []
    """Tokens of every attention shard in the last layer."""
    is_decode: bool = False
    """Where dp is over 1: every request of the whole step has one token, is sampled, and waits for no pages."""


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
    """Report that a step is computed, from the rank that samples, where that is not the leader itself."""

    step: int
    dp_rank: int
    sampled: Mapping[Room, Sampled]


class StepWork(Tagged, frozen=True):
    """Work of one rank since it began to take requests."""

    global_rank: int
    num_steps: int
    step_s: float
    """Time of all these steps, waiting for other ranks in them included."""
    expert_tokens: Mapping[int, int] = {}
    """By the model's expert, over all of the rank's layers."""
    dropped: Mapping[str, int] = {}
    """Messages kept out of its inbox, by reason; the leader knows those of its own."""


class SendReport(Tagged, frozen=True):
    """One rank's state of one room's transfer changed."""

    room: Room
    generation: int
    sender_rank: int
    state: SendState
    reason: str = ""
    num_bytes: int = 0
    """Bytes that this rank wrote, and how long that took."""
    write_s: float = 0.0
