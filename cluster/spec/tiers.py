"""Tiers of cached pages, and the messages by which a leader moves pages between them."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from cluster.spec.kv import lifetime_of

JOB_BOUNDS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)
"""Upper bounds of the buckets in the histogram of job times; one more bucket has no bound."""


class Tier(StrEnum):
    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class CachedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Number of prompt tokens whose KV was cached."""

    total: int = 0
    host: int = 0
    """Tokens loaded from host memory."""
    storage: int = 0
    """Tokens loaded from storage."""

    def __add__(self, other: "CachedTokens") -> "CachedTokens":
        return CachedTokens(
            total=self.total + other.total, host=self.host + other.host, storage=self.storage + other.storage
        )


class TierJobKind(StrEnum):
    """Operation of a tier job on its pages."""

    SAVE = "save"
    """Copy the job's pages from device to host memory."""
    LOAD = "load"
    """Copy the job's pages from host to device memory."""
    LOOK_UP = "look_up"
    """Look up which of the job's pages are in storage."""
    FETCH = "fetch"
    """Read the job's pages from storage into host memory."""
    STORE = "store"
    """Write the job's pages from host memory to storage."""


JOB_QUEUES = {
    TierJobKind.SAVE: "saves",
    TierJobKind.LOAD: "loads",
    TierJobKind.LOOK_UP: "reads",
    TierJobKind.FETCH: "reads",
    TierJobKind.STORE: "writes",
}
"""Queue of a rank for each kind of job. A queue runs one job at a time."""


class TierPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a tier job, by the leader's page numbers, which count across all ranks."""

    key: bytes
    index: int
    """Index for the owner rule of ``cluster.spec.kv``: among n parts, part ``index % n`` owns the page."""
    depth: int = 0
    """Number of pages before this one in its prompt. The page is useless without them."""
    device: int | None = None
    """Page in the device pools; set if device memory is read or written."""
    host: int | None = None
    """Page in the host pools: page h is page h // cp of CP rank h % cp; None if pages are only looked up."""

    @property
    def lifetime(self) -> int:
        """Index of the lifetime whose KV groups are in the page."""
        return lifetime_of(self.key)


class TierJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Work for every rank. Each rank does its part and always reports a result."""

    job_id: int
    kind: TierJobKind
    pages: list[TierPage]
    timeout_s: float | None = None
    """Time in seconds from the job's arrival until a rank stops calling storage."""


class StorageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's view of storage, which other ranks may share."""

    used_bytes: int
    """Bytes at the last count, plus the bytes this rank has written since."""
    num_evicted: int
    evicted_bytes: int


class TierJobResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One rank's result of a tier job."""

    job_id: int
    global_rank: int
    done: list[bool]
    """One flag per page: True if this rank has done its part, even if that part is empty."""
    num_bytes: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    storage: StorageFigures | None = None
    """Storage figures; None if the backend has none."""
    failures: dict[str, int] = {}
    """Failed pages by reason. A page that storage does not have is not a failure."""


class RankWork(msgspec.Struct, frozen=True, kw_only=True):
    kind: TierJobKind
    global_rank: int
    num_jobs: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    num_within: tuple[int, ...] = (0,) * (len(JOB_BOUNDS_S) + 1)
    """Histogram of job times, including the time in the queue."""
    failures: dict[str, int] = {}


class RankTiers(msgspec.Struct, frozen=True, kw_only=True):
    global_rank: int
    host_pages: int
    used_host_pages: int
    num_evicted: int
    num_open: dict[TierJobKind, int]
    storage: StorageFigures | None
    """Latest figures; None if the storage backend has none."""


class TierState(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers below the device memory of one replica."""

    host_pages: int
    used_host_pages: int
    num_pinned: int
    """Host pages that are never evicted."""
    num_evicted: int
    num_lost: int
    """Pages that should have been copied to a lower tier but were not."""
    num_late: int
    """Requests that started without pages that storage did not deliver in time."""
    num_stuck: int
    """Host pages of hanging storage calls, which are not reused until the calls return."""
    num_waiting: int
    """Pages that wait to be copied to a lower tier."""
    is_attached: bool
    is_storing: bool
    """True while pages are being stored or wait to be stored; False while the breaker is open."""
    num_opened: int
    """Number of times that a breaker has opened because storage failed or was late."""
    work: tuple[RankWork, ...]
    ranks: tuple[RankTiers, ...]


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Drop all cached pages that are not in use."""

    tiers: tuple[Tier, ...] = (Tier.DEVICE, Tier.HOST)
    """Tiers to flush; replicas share storage, so it is never flushed."""


class PinPages(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Pin the host copies of these pages against eviction, or unpin them."""

    keys: list[bytes]
    is_pinned: bool


class UseStorage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Attach or detach storage."""

    is_attached: bool


def joined(states: Sequence[TierState]) -> TierState:
    """Return one state for all DP ranks of a replica."""
    counts = [field.name for field in msgspec.structs.fields(TierState) if field.type is int]
    sums = {count: sum(getattr(state, count) for state in states) for count in counts}
    return msgspec.structs.replace(
        states[0],
        **sums,
        is_attached=all(state.is_attached for state in states),
        is_storing=any(state.is_storing for state in states),
        work=tuple(work for state in states for work in state.work),
        ranks=tuple(rank for state in states for rank in state.ranks),
    )
