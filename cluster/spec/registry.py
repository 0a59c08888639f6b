"""Data of the rank table: what a rank registers with the bootstrap service, and what the table shows to everyone."""

from enum import StrEnum

import msgspec

from cluster.spec.ids import Incarnation, ReplicaId, Role
from cluster.spec.kv import KvGeometry, PoolLayout
from cluster.spec.strategy import Passing, Strategy
from cluster.spec.tiers import TierState


class TransferMode(StrEnum):
    """CP ranks of a prefill replica that send KV."""

    RANK0 = "rank0"
    """CP rank 0 sends everything; the others only report."""
    ALL_RANKS = "all_ranks"
    """Every CP rank sends its part of the pages: CP ranks take turns."""


class Verify(StrEnum):
    """Checks of a prompt's KV in decode before it is used."""

    COUNTS = "counts"
    """All senders together wrote the expected number of pages and bytes."""
    DIGEST = "digest"
    """Additionally, every page holds the bytes that were sent."""


class KvOwnership(StrEnum):
    """Location of a request's KV in a CP group."""

    REPLICATED = "replicated"
    """Every CP rank holds all of it."""
    SHARDED = "sharded"
    """Every CP rank holds the pages it owns: page id g belongs to rank g modulo cp, as page g // cp of its pool."""

    def num_owners(self, cp: int) -> int:
        """Return the number of CP ranks over which the pages of a request are divided."""
        return cp if self is KvOwnership.SHARDED else 1


class _Axes(msgspec.Struct, frozen=True, kw_only=True):
    dp: int
    cp: int
    tp: int
    pp: int

    def __str__(self) -> str:
        return f"dp{self.dp}/cp{self.cp}/tp{self.tp}/pp{self.pp}"


class AxisSizes(_Axes, frozen=True):
    """Sizes of the four axes of the rank table."""


class RankCoords(_Axes, frozen=True):
    """Position of a rank on the four axes of the rank table."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Target of a transfer backend's writes: one rank's pool."""

    backend: str
    session: str
    """Address that the backend needs to reach the memory: a file path, or host:port."""
    base_address: int
    """Address of offset 0 of the pool in the backend's address space."""
    num_bytes: int


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one start of one replica."""

    replica: ReplicaId
    role: Role
    incarnation: Incarnation
    coords: RankCoords
    sizes: AxisSizes
    global_rank: int
    address: str
    """Channel address; that of global rank 0 is the leader's."""
    endpoint: Endpoint
    geometry: KvGeometry
    layout: PoolLayout
    transfer_mode: TransferMode
    ownership: KvOwnership
    build: str
    """Version of the running code."""
    host_endpoint: Endpoint | None = None
    """Host pool of this rank, if it has one."""

    @property
    def num_owners(self) -> int:
        """Return the number of CP ranks of this replica over which the pages of a request are divided."""
        return self.ownership.num_owners(self.sizes.cp)


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill steps of one replica with one strategy and passing since it started."""

    strategy: Strategy
    passing: Passing | None = None
    """Passing in ring mode."""
    num_steps: int = 0
    num_tokens: int = 0
    """Tokens computed in all of them; divided by the steps, the chunk size."""
    total_s: float = 0.0
    """Time on the leader's own rank, including waits for other ranks."""
    total_estimate_s: float = 0.0
    """Time expected when each strategy was chosen."""
    last_s: float = 0.0
    """Time of the newest step."""
    last_estimate_s: float = 0.0


class ComputeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that one rank has computed since its replica started."""

    global_rank: int
    num_steps: int = 0
    total_s: float = 0.0
    """Time including waits for other ranks."""


class SendTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Transfers of one rank since its replica started."""

    global_rank: int
    num_transfers: int = 0
    num_bytes: int = 0
    write_s: float = 0.0
    """Time spent writing."""


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load that a leader reports with every heartbeat."""

    num_waiting: int = 0
    num_running: int = 0
    num_tokens: int = 0
    """Tokens of all unfinished requests."""
    free_pages: int = 0
    """Pages available to a new request, including cached ones that nothing holds."""
    cached_pages: int = 0
    """Cached pages, held or not."""
    evicted_pages: int = 0
    """Cached pages evicted since the start."""
    total_pages: int = 0
    stopping_pages: int = 0
    """Pages of aborted transfers that peers may still write to."""
    quarantined_pages: int = 0
    """Part of ``stopping_pages`` that is old enough to count against the quarantine limit."""
    wrong_pages: int = 0
    """Pages received since the start that differ from what was sent; see `transfer.verify`."""
    num_taken: int = 0
    """Requests since the start."""
    draining: bool = False
    dropped: dict[str, int] = {}
    """Messages without effect: by type (late, repeated, misdirected or unknown ones), and those that the inbox
    rejected.
    """
    num_preempted: int = 0
    """Preemptions since the start."""
    steps: tuple[StepTimes, ...] = ()
    """Prefill steps by strategy and passing."""
    tiers: TierState | None = None
    """Tiers below the device cache, if there are any."""
    graph_steps: dict[str, int] = {}
    """Decode steps on a GPU: `replayed`, or the reason why not."""
    graph_bytes: int = 0
    """Bytes of captured decode steps on the leader's GPU."""
    expert_tokens: dict[int, int] = {}
    """Tokens that each of the model's experts has computed since the start, over all layers."""
    computed: tuple[ComputeTimes, ...] = ()
    """Steps by global rank, of ranks that have computed anything."""
    sends: tuple[SendTimes, ...] = ()
    """Transfers by global rank, of ranks that have sent anything."""


class ReplicaEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One replica in the table."""

    replica: ReplicaId
    role: Role
    incarnation: Incarnation
    ready: bool
    """True if every rank of this incarnation is registered and has a current lease."""
    silent: tuple[int, ...] = ()
    """Global ranks whose lease expired."""
    rows: tuple[RankRow, ...]
    """Rows by global rank."""
    load: ReplicaLoad

    @property
    def leader(self) -> RankRow:
        """Return the row of global rank 0; requires a ready replica."""
        return self.rows[0]


class TableSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Whole table at one point in time."""

    version: int
    """Version; grows with every change, and watchers ask for newer ones."""
    replicas: tuple[ReplicaEntry, ...]
    reaped: dict[ReplicaId, Incarnation]
    """Highest incarnation of each replica whose processes are proven gone."""

    def find(self, replica: ReplicaId) -> ReplicaEntry | None:
        return next((entry for entry in self.replicas if entry.replica == replica), None)


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Renewal of the lease of a whole replica by its leader."""

    replica: ReplicaId
    incarnation: Incarnation
    rows_digest: str
    """Digest of the replica's rows; if the service does not know it, they are registered again."""
    load: ReplicaLoad
