"""The part of the deploy YAML about the tiers below the device cache."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from cluster.spec.config_node import MemoryGib, Node, PositiveInt, PositiveSeconds, Text


class WritePolicy(StrEnum):
    """When a page is copied from the device cache to host memory, and from there to storage."""

    WRITE_THROUGH = "write_through"
    """As soon as it is there."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """Once `hicache.selective_hits` requests have found it."""
    WRITE_BACK = "write_back"
    """When it is among the next to be evicted."""


class PrefetchPolicy(StrEnum):
    """How long a request waits for pages that are read from storage; later ones serve other requests."""

    BEST_EFFORT = "best_effort"
    """Not at all."""
    WAIT_COMPLETE = "wait_complete"
    """Until all pages have arrived, half a minute at most."""
    TIMEOUT = "timeout"
    """`prefetch_base_s`, and `prefetch_s_per_1k_tokens` for every 1000 tokens."""


class StorageBackendName(StrEnum):
    """Storage that keeps pages when all replicas have ended."""

    NONE = "none"
    FILES = "files"
    MOONCAKE_STORE = "mooncake_store"


LEAST_LENT_GIB = 1 / 64
"""Least memory that Mooncake Store accepts."""
STORE_CLIENT_BYTES = 128 << 20
"""Memory of a Mooncake Store client for objects in transit."""
STORE_OUTGOING_BYTES = 32 << 20
"""Memory beside it for the objects that one call writes."""

Rate = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]


class StorageConfig(Node):
    """The tier below host memory. It outlives replicas, and those with the same tp and pp share its pages."""

    backend: StorageBackendName = StorageBackendName.NONE
    """`files` in a folder, or `mooncake_store`, a Mooncake Store cluster."""
    folder: Text | None = None
    """Folder of `files`, which hosts may share. By default a folder in Baton's cache folder."""
    max_gib: MemoryGib = 64.0
    """Soft limit of `files` in GiB, over all writers: the least recently used objects are removed, and writers may
    exceed it for a short while."""
    fsync: Annotated[bool, Field(strict=True)] = False
    """Whether `files` waits for the disk; if not, a power failure may corrupt objects, which are then not used."""
    master: Text = "127.0.0.1:50051"
    """Host and port of the master of `mooncake_store`."""
    lent_gib: Annotated[float, Field(ge=0, le=65536, strict=True)] = 0.0
    """Memory that each worker lends to `mooncake_store`, in GiB, beside that of its servers: 0, or at least 1/64
    (16 MiB)."""
    prefetch: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    """How long a request waits for its pages: `best_effort` not at all, `wait_complete` until all have arrived, half a
    minute at most, `timeout` as the next two keys say."""
    prefetch_base_s: PositiveSeconds = 1.0
    """Longest wait under `timeout`, for any number of tokens."""
    prefetch_s_per_1k_tokens: PositiveSeconds = 0.25
    """Additional wait under `timeout` for every 1000 tokens."""
    prefetch_min_tokens: PositiveInt = 256
    """Fewer tokens are computed rather than read."""
    read_mib_s: Rate | None = None
    """Read limit of each worker in MiB per second; none by default."""
    write_mib_s: Rate | None = None
    """Write limit of each worker in MiB per second; none by default."""


class HicacheConfig(Node):
    """Tiers below the device cache, which keep prefixes for longer."""

    host_gib: Annotated[float, Field(ge=0, le=65536, strict=True)] = 0.0
    """Host memory of each worker for cached pages, in GiB; 0 for none. Storage needs some."""
    host_ratio: Annotated[float, Field(ge=0, le=1024, strict=True)] = 0.0
    """The same as a multiple of the worker's page pool, if `host_gib` is not given."""
    write: WritePolicy = WritePolicy.WRITE_THROUGH
    """When pages are copied to the tier below."""
    selective_hits: PositiveInt = 2
    """Requests that must have found a page before `write_through_selective` copies it."""
    storage: StorageConfig = StorageConfig()
    """The tier below host memory."""

    @property
    def has_host(self) -> bool:
        """Whether host memory holds pages."""
        return self.host_gib > 0 or self.host_ratio > 0

    def host_bytes(self, pool_bytes: int) -> int:
        """Return the host memory for cached pages of a worker with such a pool."""
        return int(self.host_gib * (1 << 30)) or int(self.host_ratio * pool_bytes)

    @property
    def is_stored(self) -> bool:
        """Whether pages outlive their replicas."""
        return self.has_host and self.storage.backend is not StorageBackendName.NONE
