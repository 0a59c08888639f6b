"""Keys of the deploy file for the KV tiers below the device cache."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from cluster.spec.config_node import MemoryGib, Node, Text

STORE_CLIENT_BYTES = 128 << 20
"""Memory of a Mooncake Store client for objects in transit."""


class WritePolicy(StrEnum):
    """Policies for copying pages from the device cache to host memory, and from there to storage."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class PrefetchPolicy(StrEnum):
    """Policies for how long a request waits for pages from storage. Pages that arrive later serve other requests."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


class StorageBackendName(StrEnum):
    """Storage backends, which keep pages after all replicas have ended."""

    NONE = "none"
    FILES = "files"
    MOONCAKE_STORE = "mooncake_store"


class StorageConfig(Node):
    """The tier below host memory. It outlives replicas, and replicas with the same tp and pp share its pages."""

    backend: StorageBackendName = StorageBackendName.NONE
    """Storage backend: `none`, `files` in a folder, or `mooncake_store`, a Mooncake Store cluster, to which workers
    contribute no memory."""
    folder: Text | None = None
    """Folder for `files`, by default in Baton's cache folder; hosts may share it. It is private to its account and
    contains the key that authenticates pages. For `mooncake_store`, the folder of this key, by default none."""
    max_gib: MemoryGib = 64.0
    """Soft limit on the size of the `files` backend's folder, in GiB, over all writers: the least recently used pages
    are removed, and writers may briefly exceed the limit."""
    master: Text = "127.0.0.1:50051"
    """Host and port of the Mooncake Store master."""
    prefetch: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    """Policy for waiting for pages from storage: `best_effort` does not wait, `wait_complete` waits for all pages, up
    to 30 seconds, and `timeout` waits up to 1 second plus 0.25 seconds for every 1000 tokens."""


class HicacheConfig(Node):
    """The KV tiers below the device cache, which keep prefixes for longer."""

    host_gib: Annotated[float, Field(ge=0, le=65536, strict=True)] = 0.0
    """Host memory of each worker for cached pages, in GiB; 0 for none. Storage needs host memory."""
    write: WritePolicy = WritePolicy.WRITE_THROUGH
    """Policy for copying pages to the tier below: `write_through` immediately, `write_through_selective` after two
    cache hits, `write_back` shortly before they are evicted."""
    storage: StorageConfig = StorageConfig()
    """The tier below host memory."""

    @property
    def has_host(self) -> bool:
        return self.host_gib > 0

    @property
    def host_bytes(self) -> int:
        return int(self.host_gib * (1 << 30))

    @property
    def is_stored(self) -> bool:
        """True if pages outlive their replica."""
        return self.has_host and self.storage.backend is not StorageBackendName.NONE
