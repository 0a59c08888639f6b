"""What a rank tells the bootstrap service about itself, and what the table tells everyone."""

from enum import StrEnum

import msgspec

from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.kv import KvGeometry, PoolLayout
from cluster.spec.lifecycle import Role
from cluster.spec.strategy import Passing, Strategy
from cluster.spec.tiers import TierState


class TransferMode(StrEnum):
    """Which CP ranks of a prefill replica send KV."""

    RANK0 = "rank0"
    """CP rank 0 sends everything; the others only report."""
    ALL_RANKS = "all_ranks"
    """Every CP rank sends the pages that the filter gives it."""


class Verify(StrEnum):
    """What decode checks of a prompt's KV before it uses it."""

    COUNTS = "counts"
    """That all senders together wrote as many pages and bytes as there are."""
    DIGEST = "digest"
    """Also that every page holds the bytes that were sent."""


class PageFilter(StrEnum):
    """How the pages of a request are divided over CP ranks when all of them send replicated KV."""

    MODULAR = "modular"
    """Page j belongs to rank (base + j) mod cp; a growing prompt never changes an owner."""
    CONTIGUOUS = "contiguous"
    """Each rank takes one consecutive part of the request."""


class KvOwnership(StrEnum):
    """Where the KV of a request lives in a CP group."""

    REPLICATED = "replicated"
    """Every CP rank holds all of it."""
    SHARDED = "sharded"
    """Every CP rank holds the pages it owns: page id g belongs to rank g modulo cp, as page g // cp of its pool."""

    def num_owners(self, cp: int) -> int:
        """CP ranks that the pages of a request are divided over."""
        return cp if self is KvOwnership.SHARDED else 1


class RankCoords(msgspec.Struct, frozen=True, kw_only=True):
    """A position, or the sizes, on the four axes of the rank table."""

    dp: int
    cp: int
    tp: int
    pp: int

    def __str__(self) -> str:
        return f"dp{self.dp}/cp{self.cp}/tp{self.tp}/pp{self.pp}"


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a transfer backend can write into one rank's pool."""

    backend: str
    session: str
    """What the backend needs to reach the memory: a file path, or host:port."""
    base_address: int
    """Offset 0 of the pool in the backend's address space."""
    num_bytes: int


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one start of one replica."""

    replica: ReplicaId
    role: Role
    incarnation: Incarnation
    coords: RankCoords
    sizes: RankCoords
    global_rank: int
    address: str
    """Channel address; that of global rank 0 is the leader's."""
    endpoint: Endpoint
    geometry: KvGeometry
    layout: PoolLayout
    transfer_mode: TransferMode
    page_filter: PageFilter
    ownership: KvOwnership
    build: str
    """Version of the code that runs."""
    host_endpoint: Endpoint | None = None
    """This rank's memory for pages beside the device's, if it has any."""

    @property
    def num_owners(self) -> int:
        """CP ranks of this replica that the pages of a request are divided over."""
        return self.ownership.num_owners(self.sizes.cp)


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that one replica has run in one way since it started."""

    strategy: Strategy
    passing: Passing | None = None
    """Of ring mode."""
    num_steps: int = 0
    num_tokens: int = 0
    """Computed in all of them: divided by the steps, the size of a chunk."""
    total_s: float = 0.0
    """As the leader's own rank took, waiting for the others included."""
    total_estimate_s: float = 0.0
    """As was expected when each strategy was chosen."""
    last_s: float = 0.0
    """Of the newest step."""
    last_estimate_s: float = 0.0


class ComputeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that one rank has computed since its replica started."""

    global_rank: int
    num_steps: int = 0
    total_s: float = 0.0
    """Waiting for other ranks included."""


class SendTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has sent since its replica started."""

    global_rank: int
    num_transfers: int = 0
    num_bytes: int = 0
    write_s: float = 0.0
    """Time in which it wrote."""


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a leader says of itself with every heartbeat."""

    num_waiting: int = 0
    num_running: int = 0
    num_tokens: int = 0
    """Tokens of all unfinished requests."""
    free_pages: int = 0
    """Pages that a new request can have; cached ones that nobody holds are among them."""
    cached_pages: int = 0
    """Pages kept for their tokens, held or not."""
    evicted_pages: int = 0
    """Of these, those that were given up for others, since the start."""
    total_pages: int = 0
    stopping_pages: int = 0
    """Pages of transfers that were given up, and of which nobody has proven yet that nobody writes any more."""
    quarantined_pages: int = 0
    """Of these, those given up so long ago that they count against the limit of quarantine."""
    wrong_pages: int = 0
    """Received since the start, and not as they were sent; see `transfer.verify`."""
    num_taken: int = 0
    """Requests since the start."""
    draining: bool = False
    dropped: dict[str, int] = {}
    """What had no effect: messages by type (late, repeated, foreign or unknown ones), and what the inbox kept out."""
    num_preempted: int = 0
    """Times that a request had to give its pages back, since the start."""
    steps: tuple[StepTimes, ...] = ()
    """Prefill steps, by strategy and passing."""
    tiers: TierState | None = None
    """The tiers below the device cache, if there are any."""
    graph_steps: dict[str, int] = {}
    """Decode steps on a GPU: `replayed`, or why not."""
    graph_bytes: int = 0
    """Of the leader's GPU, that recorded decode steps hold."""
    expert_tokens: dict[int, int] = {}
    """Tokens that each of the model's experts has computed since the start, over all layers."""
    computed: tuple[ComputeTimes, ...] = ()
    """By global rank, of those that have computed anything."""
    sends: tuple[SendTimes, ...] = ()
    """By global rank, of those that have sent anything."""


class ReplicaEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One replica in the table."""

    replica: ReplicaId
    role: Role
    incarnation: Incarnation
    ready: bool
    """Every rank of this incarnation is registered and its lease runs."""
    silent: tuple[int, ...] = ()
    """Global ranks whose lease ran out."""
    rows: tuple[RankRow, ...]
    """By global rank."""
    load: ReplicaLoad

    @property
    def leader(self) -> RankRow:
        """The row of global rank 0; only of a ready replica."""
        return self.rows[0]


class TableSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The whole table at one moment."""

    version: int
    """Grows with every change; a watcher asks for what is newer."""
    replicas: tuple[ReplicaEntry, ...]
    reaped: dict[ReplicaId, Incarnation]
    """Highest incarnation of each replica whose processes are proven gone."""
    stop_requested: bool = False
    """Somebody asked for the whole cluster to drain and stop."""

    def find(self, replica: ReplicaId) -> ReplicaEntry | None:
        """The entry of a replica, if it is in the table."""
        return next((entry for entry in self.replicas if entry.replica == replica), None)


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """A leader renews the lease of its whole replica."""

    replica: ReplicaId
    incarnation: Incarnation
    rows_digest: str
    """Digest of the replica's row set; unknown to the service means it must be sent again."""
    load: ReplicaLoad
