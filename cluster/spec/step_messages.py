"""Messages between a leader and the ranks of its replica."""

from collections.abc import Mapping

from cluster.spec.ids import Incarnation, Peer, ReplicaId, Room
from cluster.spec.registry import RankRow
from cluster.spec.sampling import Sampled, Sampling
from cluster.spec.strategy import Passing, Strategy
from cluster.spec.tiers import TierJob
from cluster.spec.transfer_messages import SendState
from cluster.spec.wire import Struct, Tagged


class Destination(Struct, frozen=True):
    """Destination of one request's pages: a ticket, as the sender ranks need it."""

    generation: int
    decode: Peer
    rows: list[RankRow]
    """Decode ranks by global rank: endpoints and layouts of their pools."""
    num_tokens: int
    """Tokens whose KV is sent: the prompt, and output of earlier attempts."""
    pages: list[list[int]]
    """Page ids by lifetime, as in the ticket."""
    num_held_pages: int


class Admit(Struct, frozen=True):
    """Request that the following steps refer to by its room only."""

    room: Room
    prompt_len: int
    owner_base: int
    """Part that owns page 0 when pages are divided over the CP ranks."""
    sampling: Sampling
    destination: Destination | None
    """Destination; None if KV stays on this replica."""
    history: list[int] = []
    """Prompt and output so far; set only if sampling looks back."""
    traced: bool = False


class ScheduledRequest(Struct, frozen=True):
    """One request's part of a step."""

    room: Room
    first_position: int
    """Tokens of this request that already have KV."""
    token_ids: list[int]
    new_pages: list[list[int]]
    """Pages added to the request's page tables before this step, by lifetime; empty if there are none."""
    samples: bool
    """True if the last token's logits give an output token."""
    output_position: int
    """Index of that output token in the request's output."""
    input_from_previous_step: bool = False
    """True if the one token here is sampled by the previous step; ``token_ids`` then holds a placeholder."""
    scored_ids: list[int] = []
    """Prompt tokens that follow those here, if their log-probabilities are requested."""


class StepShape(Struct, frozen=True):
    """Sharding and size of one step, built once by the leader. The defaults describe a step without tokens."""

    strategy: Strategy = Strategy.NONE
    passing: Passing | None = None
    """Passing, if KV is sharded; None if it is replicated."""
    shard_lens: tuple[int, ...] = (0,)
    """Tokens of every attention shard, by dp * cp_size + cp; one entry if all shards have the same tokens."""
    last_shard_lens: tuple[int, ...] = (0,)
    """Tokens of every attention shard that have queries in the last layer."""
    is_decode: bool = True
    """True if every request has one token, is sampled without prompt log-probabilities, and waits for no pages."""


class StepPlan(Tagged, frozen=True):
    """One step of the whole replica: the leader decides, followers obey."""

    step: int
    shape: StepShape
    admits: list[Admit]
    scheduled: list[ScheduledRequest]
    releases: list[Room]
    """Requests to forget before this step."""
    arrived: list[int] = []
    """Pages that prefill has written since the last plan. They are first copied to where they are read: on a GPU, and
    to all ranks that hold the same heads.
    """
    layerwise_load: TierJob | None = None
    """Load of the cached pages that the step's one request reads, from host memory, layer by layer during the step."""
    estimate_s: float | None = None
    """Expected time of the step; None if the strategy was not chosen by time."""


class DropSend(Tagged, frozen=True):
    """Instruction to stop writing for this room, then report."""

    room: Room
    generation: int


class ForgetPeer(Tagged, frozen=True):
    """Proof that this start of a decode replica, and all before it, are gone: its memory can be closed."""

    replica: ReplicaId
    incarnation: Incarnation


class ReportTrace(Tagged, frozen=True):
    """Request of the router to every rank to send the trace of a request, and forget it."""

    room: Room
    reply_to: str


class Shutdown(Tagged, frozen=True):
    """Leave the loop."""

    reason: str


class StepResult(Tagged, frozen=True):
    """Report that a step is computed, from the rank that samples, if that is not the leader itself."""

    step: int
    dp_rank: int
    sampled: Mapping[Room, Sampled]


class StepWork(Tagged, frozen=True):
    """Work of one rank since it began to take requests."""

    global_rank: int
    num_steps: int
    step_s: float
    """Time of all these steps, including waits for other ranks."""
    expert_tokens: Mapping[int, int] = {}
    """Tokens by the model's expert, over all of the rank's layers."""
    dropped: Mapping[str, int] = {}
    """Messages that the rank's inbox rejected, by reason; the leader knows its own."""


class SendReport(Tagged, frozen=True):
    """New state of one room's transfer on one rank."""

    room: Room
    generation: int
    sender_rank: int
    state: SendState
    reason: str = ""
    num_bytes: int = 0
    """Bytes that this rank wrote, and the time that took."""
    write_s: float = 0.0
