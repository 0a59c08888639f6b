"""Messages between a leader and the ranks of its replica."""

from collections.abc import Mapping

from cluster.spec.ids import Incarnation, Peer, ReplicaId, Room
from cluster.spec.registry import RankRecord
from cluster.spec.sampling import Sampled, Sampling
from cluster.spec.strategy import Passing, Strategy
from cluster.spec.tiers import TierJob
from cluster.spec.transfer_messages import SendState
from cluster.spec.wire import Struct, Tagged


class Destination(Struct, frozen=True):
    """Destination of a request's KV: the parts of the ticket that ranks need, and the decode ranks."""

    decode: Peer
    ranks: list[RankRecord]
    """Records of the decode ranks, by global rank."""
    num_tokens: int
    """Number of tokens whose KV is sent: the prompt, and output of earlier attempts."""
    pages: list[list[int]]
    """Page ids by lifetime, as in the ticket."""
    num_held_pages: int


class NewRequest(Struct, frozen=True):
    """Announcement of a request to the ranks of its replica. Later messages refer to it by its room."""

    room: Room
    prompt_len: int
    owner_base: int
    """Owner of page 0 if pages are divided over the CP ranks."""
    sampling: Sampling
    destination: Destination | None
    """Destination; None if the KV stays on this replica."""
    history: list[int] = []
    """Prompt and output so far, if sampling depends on them."""
    traced: bool = False


class ScheduledRequest(Struct, frozen=True):
    """Part of a request that one step computes."""

    room: Room
    first_position: int
    """Number of tokens that already have KV."""
    token_ids: list[int]
    new_pages: list[list[int]]
    """Pages to append to the request's page tables, by lifetime; empty if there are none."""
    samples: bool
    """True if an output token is sampled after the last token."""
    output_position: int
    """Index of the sampled token in the request's output."""
    input_from_previous_step: bool = False
    """True if the previous step samples this step's only token; ``token_ids`` then has a placeholder."""
    scored_ids: list[int] = []
    """Prompt token that follows each of ``token_ids``, if prompt log-probabilities are requested."""


class StepShape(Struct, frozen=True):
    """Sharding and size of one step, built once by the leader. The defaults describe a step without tokens."""

    strategy: Strategy = Strategy.NONE
    passing: Passing | None = None
    """Tensors that circulate, if KV is sharded; None if KV is replicated."""
    shard_lens: tuple[int, ...] = (0,)
    """Number of tokens per attention shard, at index dp * cp_size + cp; one entry if all compute the same tokens."""
    last_layer_lens: tuple[int, ...] = (0,)
    """Number of tokens per attention shard that have queries in the last layer."""
    is_decode: bool = True
    """True if every request has one token, is sampled without prompt log-probabilities, and waits for no pages."""


class StepPlan(Tagged, frozen=True):
    """Step of one DP rank, which the leader sends to all of that DP rank's workers."""

    step: int
    shape: StepShape
    new_requests: list[NewRequest]
    scheduled: list[ScheduledRequest]
    releases: list[Room]
    """Requests to forget before this step."""
    received_pages: list[int] = []
    """Pages received from prefill since the last plan, which ranks make readable before the step."""
    layerwise_load: TierJob | None = None
    """Load of cached pages of the step's only request from host memory, layer by layer during the step."""
    estimate_s: float | None = None
    """Expected duration of the step; None if the strategy was not chosen by time."""


class CancelSend(Tagged, frozen=True):
    """Instruction to stop sending a room's KV, and to report when nothing more is written."""

    room: Room


class ForgetPeer(Tagged, frozen=True):
    """Notice that this and earlier incarnations of a decode replica are gone, so that their memory can be released."""

    replica: ReplicaId
    incarnation: Incarnation


class ReportTrace(Tagged, frozen=True):
    """Router's instruction to every rank to send its trace of a request, and to forget it."""

    room: Room
    reply_to: str


class Shutdown(Tagged, frozen=True):
    """Instruction to leave the work loop."""


class StepResult(Tagged, frozen=True):
    """Sampled tokens of a DP rank's oldest step in flight, from the sampling rank if that is not the leader's rank."""

    dp_rank: int
    sampled: Mapping[Room, Sampled]
    communication_s: float = 0.0
    """Time that the rank spent in collectives, as in ``ComputedStep``."""


class StepWork(Tagged, frozen=True):
    """Work of one rank since the replica started."""

    global_rank: int
    num_steps: int
    step_s: float
    """Total duration of the steps, including waits for other ranks."""
    expert_tokens: Mapping[int, int] = {}
    """Number of tokens by expert, over all of the rank's layers."""
    dropped: Mapping[str, int] = {}
    """Number of messages that the rank's inbox dropped, by reason; empty from the leader's own rank."""


class SendReport(Tagged, frozen=True):
    """Final state of one room's transfer on one rank."""

    room: Room
    sender_rank: int
    state: SendState
    reason: str = ""
    num_bytes: int = 0
    """Number of bytes that this rank wrote."""
    write_s: float = 0.0
    """Time spent writing."""
