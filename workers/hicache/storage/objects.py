"""Names of one rank's pages in storage, and the headers that prove that an object is its page. No I/O."""

import hashlib

import msgspec

from cluster.spec.registry import RankRow
from cluster.spec.tiers import TierPage
from transfer.plan import copies_of

FORMAT_VERSION = 4
"""Version of names, headers and the order of bytes in a page. Objects of other versions are not found."""
HEADER_BYTES = 256
_LENGTH_BYTES = 2


class _Header(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    namespace: str
    key: bytes
    shard: str
    """Heads of each KV group, and layers."""
    writer: str
    """Ownership and coordinates of the rank that wrote the object; any reader accepts all of them."""
    digest: bytes


class ObjectFormat:
    """Format of one rank's objects: its heads and layers of pages.

    A page's bytes do not depend on CP, so that replicas share objects if they divide heads and layers alike. Tenants
    have different page keys, which begin with their salts.
    """

    def __init__(self, row: RankRow, weights: str) -> None:
        """Build the format; ``weights`` is a digest of the model's weights."""
        geometry, layout, coords, sizes = row.geometry, row.layout, row.coords, row.sizes
        self.is_writer = coords.tp % copies_of(row) == 0
        """Whether this rank writes; the first of the TP ranks with the same heads does, and all of them read."""
        # Fields that must be equal for KV to be interchangeable; the model's served name need not be.
        facts = (FORMAT_VERSION, weights, geometry.page_size, geometry.num_layers, geometry.groups)
        self._namespace = hashlib.blake2b(msgspec.msgpack.encode(facts), digest_size=16).hexdigest()
        heads = "_".join(f"h{group.heads.start}-{group.heads.stop - 1}" for group in layout.groups)
        self._shard = f"{heads}.l{layout.layers.start}-{layout.layers.stop - 1}"
        at = (f"{axis}{getattr(coords, axis)}of{getattr(sizes, axis)}" for axis in ("cp", "tp", "pp"))
        self._writer = "-".join([row.ownership.value, *at])

    def name(self, page: TierPage) -> str:
        return f"{self._namespace}/{page.key.hex()}.{self._shard}"

    def header(self, page: TierPage, data: memoryview) -> bytes:
        """Return the first bytes of the object of a page: two of length, MessagePack, zeros."""
        return self._header(page, data, self._writer)

    def matches(self, page: TierPage, header: bytes, data: memoryview) -> bool:
        """Return whether a header and the bytes after it are this page as some rank wrote it."""
        end = _LENGTH_BYTES + int.from_bytes(header[:_LENGTH_BYTES], "little")
        try:
            writer = msgspec.msgpack.decode(header[_LENGTH_BYTES:end], type=_Header).writer
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False
        return header == self._header(page, data, writer)

    def _header(self, page: TierPage, data: memoryview, writer: str) -> bytes:
        header = _Header(
            namespace=self._namespace,
            key=page.key,
            shard=self._shard,
            writer=writer,
            digest=_digest(data, writer),
        )
        packed = msgspec.msgpack.encode(header)
        return (len(packed).to_bytes(_LENGTH_BYTES, "little") + packed).ljust(HEADER_BYTES, b"\0")


def _digest(data: memoryview, writer: str) -> bytes:
    """Hash bytes to detect accidents, not attacks."""
    # Only workers with storage need the library.
    from xxhash import xxh3_128

    digest = xxh3_128(data)
    digest.update(writer.encode())
    return digest.digest()
