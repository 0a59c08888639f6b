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
    shape: tuple[int, ...]
    first_head: int
    first_layer: int
    dtype: str
    writer: str
    """Ownership and coordinates of the rank that wrote the object, under which any reader accepts it."""
    digest: bytes


class ObjectFormat:
    """The objects of one rank: its heads and layers of pages.

    A page's bytes do not depend on CP, so that replicas share objects if they divide heads and layers alike. Tenants
    have different page keys, which begin with their salts.
    """

    def __init__(self, row: RankRow, weights: str) -> None:
        """``weights`` is a digest of the model's weights."""
        geometry, layout, coords, sizes = row.geometry, row.layout, row.coords, row.sizes
        self.is_writer = coords.tp % copies_of(row) == 0
        """Whether this rank writes; of TP ranks with the same heads the first one does, and all of them read."""
        # All that must be equal for KV to be interchangeable; the model's served name need not be.
        facts = (
            FORMAT_VERSION,
            weights,
            geometry.dtype,
            geometry.page_size,
            (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim),
        )
        self._namespace = hashlib.blake2b(msgspec.msgpack.encode(facts), digest_size=16).hexdigest()
        last_head, last_layer = layout.first_head + layout.num_heads - 1, layout.first_layer + layout.num_layers - 1
        self._shard = f"h{layout.first_head}-{last_head}.l{layout.first_layer}-{last_layer}"
        self._layout, self._dtype = layout, geometry.dtype
        at = (f"{axis}{getattr(coords, axis)}of{getattr(sizes, axis)}" for axis in ("cp", "tp", "pp"))
        self._writer = "-".join([row.ownership.value, *at])

    def name(self, page: TierPage) -> str:
        return f"{self._namespace}/{page.key.hex()}.{self._shard}"

    def header(self, page: TierPage, data: memoryview) -> bytes:
        """Return the first bytes of the object of a page: two of length, MessagePack, zeros."""
        return self._header(page, data, self._writer)

    def matches(self, page: TierPage, header: bytes, data: memoryview) -> bool:
        """Return whether a header and the bytes behind it are this page as some rank wrote it."""
        end = _LENGTH_BYTES + int.from_bytes(header[:_LENGTH_BYTES], "little")
        try:
            writer = msgspec.msgpack.decode(header[_LENGTH_BYTES:end], type=_Header).writer
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False
        return header == self._header(page, data, writer)

    def _header(self, page: TierPage, data: memoryview, writer: str) -> bytes:
        layout = self._layout
        header = _Header(
            namespace=self._namespace,
            key=page.key,
            shape=(layout.num_heads, layout.num_layers, 2, layout.page_size, layout.head_dim),
            first_head=layout.first_head,
            first_layer=layout.first_layer,
            dtype=self._dtype,
            writer=writer,
            digest=_digest(data, writer),
        )
        packed = msgspec.msgpack.encode(header)
        return (len(packed).to_bytes(_LENGTH_BYTES, "little") + packed).ljust(HEADER_BYTES, b"\0")


def _digest(data: memoryview, writer: str) -> bytes:
    """Hash bytes against accidents, not against attackers."""
    # Only workers with storage need the library.
    from xxhash import xxh3_128

    digest = xxh3_128(data)
    digest.update(writer.encode())
    return digest.digest()
