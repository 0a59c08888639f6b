"""Records that ranks register with the bootstrap service, and the table that it serves."""

from enum import StrEnum

import msgspec

from cluster.spec.ids import Incarnation, Peer, ReplicaId, Role, role_of
from cluster.spec.kv import KvGeometry, PoolLayout
from cluster.spec.strategy import Passing, Strategy
from cluster.spec.tiers import TierState


class TransferMode(StrEnum):
    """CP ranks of a prefill replica that send KV."""

    RANK0 = "rank0"
    """CP rank 0 sends all pages; the other CP ranks only report."""
    ALL_RANKS = "all_ranks"
    """Every CP rank sends an equal share of the pages."""


class Verify(StrEnum):
    """Checks of received KV before decode uses it."""

    COUNTS = "counts"
    """All senders together have written the expected number of pages and bytes."""
    DIGEST = "digest"
    """The counts are right, and every page holds the bytes that were sent."""


class KvOwnership(StrEnum):
    """Location of a request's KV in a CP group."""

    REPLICATED = "replicated"
    """Every CP rank holds all of the KV."""
    SHARDED = "sharded"
    """Every CP rank holds the pages it owns: page g is page g // cp in the pool of rank g % cp."""

    def num_owners(self, cp: int) -> int:
        """Return the number of CP ranks that the pages of a request are divided over."""
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
    """A rank's position on the four axes of the rank table."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's pool as the target of a transfer backend's writes."""

    backend: str
    session: str
    """Address of the memory for the backend: a file path, or host:port."""
    base_address: int
    """Address of offset 0 of the pool in the backend's address space."""
    num_bytes: int


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one incarnation of a replica."""

    replica: ReplicaId
    incarnation: Incarnation
    coords: RankCoords
    sizes: AxisSizes
    global_rank: int
    address: str
    """Channel address; global rank 0 is the leader."""
    endpoint: Endpoint
    geometry: KvGeometry
    layout: PoolLayout
    transfer_mode: TransferMode
    ownership: KvOwnership
    build: str
    host_endpoint: Endpoint | None = None
    device: str = ""
    """Name of the device, for display."""

    @property
    def role(self) -> Role:
        return role_of(self.replica)

    @property
    def peer(self) -> Peer:
        """Return the replica whose leader this rank is."""
        return Peer(replica=self.replica, incarnation=self.incarnation, address=self.address)

    @property
    def num_owners(self) -> int:
        """Number of CP ranks that the pages of a request are divided over."""
        return self.ownership.num_owners(self.sizes.cp)


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's prefill steps with one strategy and passing since the replica started."""

    strategy: Strategy
    passing: Passing | None = None
    """Tensors that circulate in ring mode; None otherwise."""
    num_steps: int = 0
    num_tokens: int = 0
    """Number of tokens in all steps; divided by ``num_steps``, it is the mean chunk size."""
    total_s: float = 0.0
    """Step time on the leader's rank, including waits for other ranks."""
    total_estimate_s: float = 0.0
    """Estimated time, by which the strategies were chosen."""
    last_s: float = 0.0
    last_estimate_s: float = 0.0


class ComputeTimes(msgspec.Struct, frozen=True, kw_only=True):
    global_rank: int
    num_steps: int = 0
    total_s: float = 0.0
    """Step time, including waits for other ranks."""


class SendTimes(msgspec.Struct, frozen=True, kw_only=True):
    global_rank: int
    num_transfers: int = 0
    num_bytes: int = 0
    write_s: float = 0.0


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load that a leader reports with every heartbeat."""

    num_waiting: int = 0
    num_running: int = 0
    num_tokens: int = 0
    free_pages: int = 0
    """Pages available to a new request, including cached pages that are not in use."""
    cached_pages: int = 0
    """Cached pages, in use or not."""
    evicted_pages: int = 0
    total_pages: int = 0
    stopping_pages: int = 0
    """Pages of aborted transfers that peers may still write to."""
    quarantined_pages: int = 0
    """Pages among ``stopping_pages`` that count against the quarantine limit, because they are old."""
    wrong_pages: int = 0
    """Received pages whose digest was wrong, since the replica started; see `transfer.verify`."""
    num_taken: int = 0
    """Requests accepted since the replica started."""
    draining: bool = False
    dropped: dict[str, int] = {}
    """Dropped messages: late, repeated, misdirected or unknown ones by type, and frames that the inbox rejected."""
    num_preempted: int = 0
    num_corrupted: int = 0
    """Requests that ended because the model's logits were not finite, since the replica started."""
    steps: tuple[StepTimes, ...] = ()
    tiers: TierState | None = None
    graph_steps: dict[str, int] = {}
    """Number of a decode worker's steps, keyed by `replayed` or the reason why they were not replayed."""
    graph_bytes: int = 0
    """Memory of captured decode steps on the leader's GPU."""
    expert_tokens: dict[int, int] = {}
    """Number of tokens that each expert has computed since the replica started, over all layers."""
    computed: tuple[ComputeTimes, ...] = ()
    sends: tuple[SendTimes, ...] = ()


class ReplicaEntry(msgspec.Struct, frozen=True, kw_only=True):
    replica: ReplicaId
    incarnation: Incarnation
    ready: bool
    """True if every rank of this incarnation is registered and holds a lease."""
    silent: tuple[int, ...] = ()
    ranks: tuple[RankRecord, ...]
    load: ReplicaLoad

    @property
    def role(self) -> Role:
        return role_of(self.replica)

    @property
    def leader(self) -> RankRecord:
        """Record of global rank 0; requires a ready replica."""
        return self.ranks[0]


class TableSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    """Version, which grows with every change."""
    replicas: tuple[ReplicaEntry, ...]
    reaped: dict[ReplicaId, Incarnation]
    """Highest incarnation per replica that is confirmed dead together with all earlier ones."""

    def find(self, replica: ReplicaId) -> ReplicaEntry | None:
        return next((entry for entry in self.replicas if entry.replica == replica), None)

    def is_reaped(self, peer: Peer) -> bool:
        """Return whether a peer is confirmed dead."""
        return self.reaped.get(peer.replica, 0) >= peer.incarnation

    def is_gone(self, peer: Peer) -> bool:
        """Return whether a peer is confirmed dead or a later incarnation has taken its place."""
        entry = self.find(peer.replica)
        return self.is_reaped(peer) or (entry is not None and entry.incarnation > peer.incarnation)


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Heartbeat of a leader, which renews its replica's lease."""

    replica: ReplicaId
    incarnation: Incarnation
    records_digest: str
    """Digest of the replica's records. If the service's records differ, the leader registers all of its own again."""
    load: ReplicaLoad
