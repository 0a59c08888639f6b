"""Names of one rank's pages in storage, and the headers that prove that an object is its page. No I/O."""

import hashlib

import msgspec

from cluster.spec.registry import RankRow
from cluster.spec.tiers import TierPage
from transfer.page_assignment import copies_of

FORMAT_VERSION = 5
"""Version of names, headers and the order of bytes in a page. Objects of other versions are not found."""
HEADER_BYTES = 256


class _Header(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    namespace: str
    key: bytes
    shard: str
    """Heads of each KV group, and layers."""
    digest: bytes


class ObjectFormat:
    """Format of one rank's objects: its heads and layers of pages.

    A page's bytes do not depend on CP, so that replicas share objects if they divide heads and layers alike. Tenants
    have different page keys, which begin with their salts.
    """

    def __init__(self, row: RankRow, weights: str) -> None:
        """Build the format; ``weights`` is a digest of the model's weights."""
        geometry, layout = row.geometry, row.layout
        self.is_writer = row.coords.tp % copies_of(row) == 0
        """Whether this rank writes; the first of the TP ranks with the same heads does, and all of them read."""
        # Fields that must be equal for KV to be interchangeable; the model's served name need not be.
        facts = (FORMAT_VERSION, weights, geometry.page_size, geometry.num_layers, geometry.groups)
        self._namespace = hashlib.blake2b(msgspec.msgpack.encode(facts), digest_size=16).hexdigest()
        heads = "_".join(f"h{group.heads.start}-{group.heads.stop - 1}" for group in layout.groups)
        self._shard = f"{heads}.l{layout.layers.start}-{layout.layers.stop - 1}"

    def name(self, page: TierPage) -> str:
        return f"{self._namespace}/{page.key.hex()}.{self._shard}"

    def header(self, page: TierPage, data: memoryview) -> bytes:
        """Return the first bytes of the object of a page: MessagePack, then zeros."""
        # Only workers with storage need the library, whose digest detects accidents, not attacks.
        from xxhash import xxh3_128_digest

        header = _Header(namespace=self._namespace, key=page.key, shard=self._shard, digest=xxh3_128_digest(data))
        return msgspec.msgpack.encode(header).ljust(HEADER_BYTES, b"\0")
