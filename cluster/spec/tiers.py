"""Where cached pages are, and what leaders are told and tell their ranks of them."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec


class Tier(StrEnum):
    """Where a cached page is."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class CachedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a prompt that were not computed, because their KV was cached."""

    total: int = 0
    host: int = 0
    """Those of them that came from host memory."""
    storage: int = 0
    """Those of them that came from storage."""

    def __add__(self, other: "CachedTokens") -> "CachedTokens":
        return CachedTokens(
            total=self.total + other.total, host=self.host + other.host, storage=self.storage + other.storage
        )


class MoveKind(StrEnum):
    """What becomes of the pages of an order."""

    SAVE = "save"
    """From device to host memory."""
    LOAD = "load"
    """From host to device memory."""
    LOOK_UP = "look_up"
    """Nothing: which of them are in storage?"""
    FETCH = "fetch"
    """From storage to host memory."""
    STORE = "store"
    """From host memory to storage."""


ORDER_BOUNDS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)
"""Ends of the ranges in which the times of orders are counted; a last one has none."""


class RankWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has made of all orders of one kind since it started."""

    kind: MoveKind
    global_rank: int
    num_orders: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    """Without waiting for their turns."""
    waited_s: float = 0.0
    """For their turns."""
    num_within: tuple[int, ...] = (0,) * (len(ORDER_BOUNDS_S) + 1)
    """Orders by their time, waiting and work together."""
    failures: dict[str, int] = {}
    """By why."""


class StorageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank knows of storage as a whole, which it may share with others."""

    used_bytes: int
    """As it last saw them, and what it has written since."""
    num_evicted: int
    """Objects that this rank gave up since its start, because there were too many."""
    evicted_bytes: int


class RankTiers(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers of one rank."""

    global_rank: int
    host_pages: int
    used_host_pages: int
    num_evicted: int
    """Host pages that had to make room."""
    num_open: dict[MoveKind, int]
    """Orders that it has not answered yet."""
    storage: StorageFigures | None
    """As the rank last told; None where its backend knows nothing."""


class TierState(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers below the device of one replica."""

    host_pages: int
    """Over all CP ranks."""
    used_host_pages: int
    num_pinned: int
    """Host pages that are never given up."""
    num_evicted: int
    """Host pages that had to make room."""
    num_lost: int
    """Pages that were to be copied to a tier below, and were not."""
    num_late: int
    """Requests that went on without pages that storage had not given in time."""
    num_stuck: int
    """Host pages that storage reads or writes and does not come back from; nobody else gets them before it has."""
    num_waiting: int
    """Pages that wait to be copied."""
    is_attached: bool
    """Storage is used."""
    is_storing: bool
    """Pages are on their way to storage, or wait for their turn; not while it is left alone."""
    num_opened: int
    """Times that storage was left alone, because it failed or was late."""
    work: tuple[RankWork, ...]
    ranks: tuple[RankTiers, ...]


class TierPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of an order. Pages are named as the leader names them, over all ranks."""

    key: bytes
    place: int
    """Says which part owns the page (``cluster.spec.page_key``)."""
    depth: int = 0
    """Pages before it in its prompt, without which it is of no use."""
    device: int | None = None
    """Page in the pools of the ranks; given where device memory is read or written."""
    host: int | None = None
    """Page h is the page h // cp of the host pool of CP rank h modulo cp; given unless pages are only looked up."""


class MovePages(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The leader's order to every rank: do your part, and answer, whatever comes of it."""

    number: int
    """Names the order in the answers."""
    kind: MoveKind
    pages: list[TierPage]
    patience_s: float | None = None
    """Storage is not asked any more when the order has waited so long."""


class PagesMoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One rank's answer to an order."""

    number: int
    global_rank: int
    done: list[bool]
    """For each page, whether nothing of it is missing here; true where this rank had nothing to do."""
    num_bytes: int = 0
    """Moved by this rank."""
    busy_s: float = 0.0
    """How long it took, without waiting for its turn."""
    waited_s: float = 0.0
    """How long that took."""
    storage: StorageFigures | None = None
    """Where the order was about storage whose backend knows them."""
    failures: dict[str, int] = {}
    """Pages that could not be had or kept, by why; that storage never had them is no failure."""


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget the cached pages that nobody holds."""

    tiers: tuple[Tier, ...] = (Tier.DEVICE, Tier.HOST)
    """Where; storage is shared and outlives replicas, so that nothing is forgotten there."""


class PinPages(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Never give up the host copies of these pages, or give them up as any others."""

    keys: list[bytes]
    is_pinned: bool


class UseStorage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read and write storage from now on, or leave it alone."""

    is_attached: bool


def joined(states: Sequence[TierState]) -> TierState:
    """The tiers of several DP ranks as those of one replica."""
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
