"""What leader and ranks say to each other of pages in host memory and in storage."""

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


class TierPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of an order. Pages are named as the leader names them, over all ranks."""

    key: bytes
    place: int
    """Says which part owns the page (``cluster.spec.page_key``)."""
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
    failures: dict[str, int] = {}
    """Pages that could not be had or kept, by why; that storage never had them is no failure."""
