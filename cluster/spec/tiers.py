"""Tiers of cached pages, and the messages by which a leader has its ranks move pages between them."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from cluster.spec.kv import lifetime_of

JOB_BOUNDS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)
"""Upper bounds of the histogram of job times; the last bucket has none."""


class Tier(StrEnum):
    """A kind of memory that holds cached pages."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class CachedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a prompt that were not computed, because their KV was cached."""

    total: int = 0
    host: int = 0
    """Tokens among them that came from host memory."""
    storage: int = 0
    """Tokens among them that came from storage."""

    def __add__(self, other: "CachedTokens") -> "CachedTokens":
        return CachedTokens(
            total=self.total + other.total, host=self.host + other.host, storage=self.storage + other.storage
        )


class TierJobKind(StrEnum):
    """Operation of a tier job on its pages."""

    SAVE = "save"
    """Copy them from device to host memory."""
    LOAD = "load"
    """Copy them from host to device memory."""
    LOOK_UP = "look_up"
    """Query which of them are in storage."""
    FETCH = "fetch"
    """Read them from storage into host memory."""
    STORE = "store"
    """Write them from host memory to storage."""


class TierPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a tier job, by the leader's page numbers, which span all ranks."""

    key: bytes
    index: int
    """Index under the owner rule of ``cluster.spec.kv``: of n parts, part ``index % n`` owns the page."""
    depth: int = 0
    """Number of pages before it in its prompt, without which it is useless."""
    device: int | None = None
    """Page in the device pools; set if device memory is read or written."""
    host: int | None = None
    """Host page h is page h // cp in the host pool of CP rank h % cp; set unless pages are only looked up."""

    @property
    def lifetime(self) -> int:
        """Return the lifetime whose KV groups are in the page."""
        return lifetime_of(self.key)


class TierJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Work for every rank: each does its part, and reports a result whatever the outcome."""

    job_id: int
    kind: TierJobKind
    pages: list[TierPage]
    timeout_s: float | None = None
    """Seconds after which storage is no longer called, counted from the job's arrival at the rank."""


class StorageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's knowledge of storage as a whole, which may be shared with other ranks."""

    used_bytes: int
    """Bytes that it last saw, plus bytes that it has written since."""
    num_evicted: int
    """Objects that this rank has evicted since its start."""
    evicted_bytes: int


class TierJobResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One rank's result of a tier job."""

    job_id: int
    global_rank: int
    done: list[bool]
    """One flag per page: this rank has done its part; true if it has none."""
    num_bytes: int = 0
    """Bytes that this rank has moved."""
    busy_s: float = 0.0
    waited_s: float = 0.0
    """Time in the queue."""
    storage: StorageFigures | None = None
    """Present if the storage backend knows them."""
    failures: dict[str, int] = {}
    """Failed pages by reason. A page that storage never had is no failure."""


class RankWork(msgspec.Struct, frozen=True, kw_only=True):
    """Completed jobs of one kind on one rank since its start."""

    kind: TierJobKind
    global_rank: int
    num_jobs: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    """Time in the queue."""
    num_within: tuple[int, ...] = (0,) * (len(JOB_BOUNDS_S) + 1)
    """Jobs by their time, queue and work together."""
    failures: dict[str, int] = {}
    """Failed pages by reason."""


class RankTiers(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers of one rank."""

    global_rank: int
    host_pages: int
    used_host_pages: int
    num_evicted: int
    """Number of evicted host pages."""
    num_open: dict[TierJobKind, int]
    """Number of jobs without a result from this rank, by kind."""
    storage: StorageFigures | None
    """Last report on storage; None if the backend has none."""


class TierState(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers below the device of one replica."""

    host_pages: int
    """Host pages of all CP ranks."""
    used_host_pages: int
    num_pinned: int
    """Host pages that are never evicted."""
    num_evicted: int
    """Evicted host pages."""
    num_lost: int
    """Number of pages that were due to be copied to a lower tier and were not."""
    num_late: int
    """Number of requests that started without pages that storage did not deliver in time."""
    num_stuck: int
    """Number of host pages of storage calls that hang; they are not reused until the calls return."""
    num_waiting: int
    """Number of pages that wait to be copied to a lower tier."""
    is_attached: bool
    """True if storage is used."""
    is_storing: bool
    """True while pages are being stored, or wait for it; false while the breaker is open."""
    num_opened: int
    """Number of times that a breaker opened, because storage failed or was late."""
    work: tuple[RankWork, ...]
    ranks: tuple[RankTiers, ...]


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Drop the cached pages that nothing holds."""

    tiers: tuple[Tier, ...] = (Tier.DEVICE, Tier.HOST)
    """Storage is not flushed, since replicas share it."""


class PinPages(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Pin the host copies of these pages, so that they are never evicted, or unpin them."""

    keys: list[bytes]
    is_pinned: bool


class UseStorage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Attach storage, or detach it."""

    is_attached: bool


def joined(states: Sequence[TierState]) -> TierState:
    """Add up the tiers of the DP ranks of one replica."""
    counts = (
        "host_pages",
        "used_host_pages",
        "num_pinned",
        "num_evicted",
        "num_lost",
        "num_late",
        "num_stuck",
        "num_waiting",
        "num_opened",
    )
    sums = {count: sum(getattr(state, count) for state in states) for count in counts}
    return msgspec.structs.replace(
        states[0],
        **sums,
        is_attached=all(state.is_attached for state in states),
        is_storing=any(state.is_storing for state in states),
        work=tuple(work for state in states for work in state.work),
        ranks=tuple(rank for state in states for rank in state.ranks),
    )
