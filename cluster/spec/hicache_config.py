"""The part of the deploy YAML about the tiers below the device cache."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from cluster.spec.config_node import MemoryGib, Node, PositiveInt, PositiveSeconds, Text


class WritePolicy(StrEnum):
    """When a page of the device cache is copied to host memory, and one of host memory to storage."""

    WRITE_THROUGH = "write_through"
    """As soon as it is there."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When requests have found it `hicache.selective_hits` times."""
    WRITE_BACK = "write_back"
    """When it is among those that will be given up next."""


class PrefetchPolicy(StrEnum):
    """How long a request waits for pages that are read from storage; those that come later serve others."""

    BEST_EFFORT = "best_effort"
    """Not at all: it starts when its turn comes."""
    WAIT_COMPLETE = "wait_complete"
    """Until everything has come, half a minute at most."""
    TIMEOUT = "timeout"
    """`prefetch_base_s`, and `prefetch_s_per_1k_tokens` for every 1000 tokens of them."""


class StorageBackendName(StrEnum):
    """What keeps pages when all replicas have ended."""

    NONE = "none"
    FILES = "files"
    MOONCAKE_STORE = "mooncake_store"


LEAST_LENT_GIB = 1 / 64
"""Mooncake Store refuses memory of less."""
STORE_CLIENT_BYTES = 128 << 20
"""Of a client of Mooncake Store, for objects on their way."""
STORE_OUTGOING_BYTES = 32 << 20
"""Beside it, for objects that are written in one call."""

Rate = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]


class StorageConfig(Node):
    """The tier below host memory, which all replicas share and which outlives them."""

    backend: StorageBackendName = StorageBackendName.NONE
    """`files` in a folder, or `mooncake_store`, a Mooncake Store cluster."""
    folder: Text | None = None
    """Of `files`; may be shared by hosts. A folder in Baton's cache folder by default."""
    max_gib: MemoryGib = 64.0
    """Most that `files` may take, in GiB, whoever writes; the least recently used objects go first."""
    fsync: Annotated[bool, Field(strict=True)] = False
    """Whether `files` waits for the disk; without, a power failure may cost some objects, which are then not read."""
    master: Text = "127.0.0.1:50051"
    """Of `mooncake_store`: host and port of its master."""
    lent_gib: Annotated[float, Field(ge=0, le=65536, strict=True)] = 0.0
    """Of `mooncake_store`: memory of each worker that it may use, in GiB, beside that of its own servers; 0 lends none,
    and 1/64 (16 MiB) is the least it takes."""
    prefetch: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    """How long a request waits for its pages: `best_effort` not at all, `wait_complete` until all have come, half a
    minute at most, `timeout` as the next two keys say."""
    prefetch_base_s: PositiveSeconds = 1.0
    """Of `timeout`: longest wait, however few the tokens are."""
    prefetch_s_per_1k_tokens: PositiveSeconds = 0.25
    """Of `timeout`: so much longer for every 1000 tokens of them."""
    prefetch_min_tokens: PositiveInt = 256
    """Fewer tokens are computed rather than read."""
    read_mib_s: Rate | None = None
    """Most that each worker reads in a second, in MiB; no limit by default."""
    write_mib_s: Rate | None = None
    """Most that each worker writes in a second, in MiB; no limit by default."""


class HicacheConfig(Node):
    """Tiers below the device cache, where prefixes outlive it."""

    host_gib: Annotated[float, Field(ge=0, le=65536, strict=True)] = 0.0
    """Host memory of each worker for cached pages, in GiB; 0 keeps none. Storage needs some."""
    host_ratio: Annotated[float, Field(ge=0, le=1024, strict=True)] = 0.0
    """The same as a multiple of the worker's page pool, where `host_gib` is not given."""
    write: WritePolicy = WritePolicy.WRITE_THROUGH
    """When pages are copied to the tier below."""
    selective_hits: PositiveInt = 2
    """Requests that must have found a page before `write_through_selective` copies it."""
    storage: StorageConfig = StorageConfig()
    """The tier below host memory."""

    @property
    def has_host(self) -> bool:
        """Whether host memory keeps pages."""
        return self.host_gib > 0 or self.host_ratio > 0

    def host_bytes(self, pool_bytes: int) -> int:
        """Host memory for cached pages of a worker with such a pool."""
        return int(self.host_gib * (1 << 30)) or int(self.host_ratio * pool_bytes)

    @property
    def is_stored(self) -> bool:
        """Whether pages outlive their replicas."""
        return self.has_host and self.storage.backend is not StorageBackendName.NONE
