"""What a page is called in storage, and the header that proves that an object is this page. No I/O."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from cluster.spec.kv import KvGeometry, PoolLayout
from cluster.spec.ranks import head_copies, kv_heads_of, stage_layers
from cluster.spec.registry import KvOwnership, RankCoords

LAYOUT_VERSION = 1
"""Of names, headers and the order of bytes in a page; a change makes everything stored before unknown."""
HEADER_BYTES = 256

Digest = bytes


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    namespace: str
    key: bytes
    shape: tuple[int, ...]
    first_head: int
    first_layer: int
    dtype: str
    digest: Digest


@dataclass(frozen=True, slots=True)
class Cut:
    """How a replica divides pages, heads and layers over its ranks, as far as stored pages tell."""

    ownership: KvOwnership
    cp: int
    tp: int
    pp: int

    @staticmethod
    def of(ownership: KvOwnership, sizes: RankCoords) -> "Cut":
        """That of a replica."""
        return Cut(ownership, sizes.cp, sizes.tp, sizes.pp)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One object: the heads and layers of a page that one rank holds."""

    name: str
    namespace: str
    layout: PoolLayout
    """Of a pool with one page."""


@dataclass(frozen=True, slots=True)
class Naming:
    """Names of one model's pages. Tenants are told apart by page keys, which begin with their salts."""

    geometry: KvGeometry
    weights: str
    """Digest of what the weights are."""

    def namespace(self, ownership: KvOwnership | None = None) -> str:
        """What must be equal for KV to be the same; the name under which the model is served is not part of it.

        Without an ownership, where the replicas of every ownership leave word of themselves.
        """
        geometry = self.geometry
        facts = (
            LAYOUT_VERSION,
            self.weights,
            geometry.dtype,
            geometry.page_size,
            (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim),
            ownership.value if ownership else "any",
        )
        return hashlib.blake2b(msgspec.msgpack.encode(facts), digest_size=16).hexdigest()

    def mark(self, cut: Cut) -> str:
        """The name of the object that says that replicas of a cut have stored pages."""
        return f"{self.namespace()}/cut.{cut.ownership}-cp{cut.cp}-tp{cut.tp}-pp{cut.pp}"

    def parts(self, cut: Cut, key: bytes, place: int, heads: range, layers: range) -> Iterator[StoredPart]:
        """The objects that replicas of a cut keep some of these heads and layers of a page in."""
        namespace = self.namespace(cut.ownership)
        for pp_rank in range(cut.pp):
            for tp_rank in range(0, cut.tp, head_copies(self.geometry.num_kv_heads, cut.tp)):
                layout = self._layout(cut, tp_rank, pp_rank)
                if _meets(heads, layout.first_head, layout.num_heads) and _meets(
                    layers, layout.first_layer, layout.num_layers
                ):
                    rank = f"cp{place % cut.cp}of{cut.cp}-tp{tp_rank}of{cut.tp}-pp{pp_rank}of{cut.pp}"
                    yield StoredPart(f"{namespace}/{key.hex()}.{rank}", namespace, layout)

    def header(self, part: StoredPart, key: bytes, digest: Digest) -> bytes:
        """The first bytes of an object: two of length, MessagePack, zeros."""
        layout = part.layout
        header = _Header(
            namespace=part.namespace,
            key=key,
            shape=(layout.num_heads, layout.num_layers, 2, layout.page_size, layout.head_dim),
            first_head=layout.first_head,
            first_layer=layout.first_layer,
            dtype=self.geometry.dtype,
            digest=digest,
        )
        packed = msgspec.msgpack.encode(header)
        return (len(packed).to_bytes(2, "little") + packed).ljust(HEADER_BYTES, b"\0")

    def _layout(self, cut: Cut, tp_rank: int, pp_rank: int) -> PoolLayout:
        geometry = self.geometry
        heads = kv_heads_of(geometry.num_kv_heads, cut.tp, tp_rank)
        layers = stage_layers(geometry.num_layers, cut.pp, pp_rank)
        itemsize = geometry.bytes_per_token // (2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim)
        return PoolLayout(
            num_pages=1,
            first_head=heads.start,
            num_heads=len(heads),
            first_layer=layers.start,
            num_layers=len(layers),
            page_size=geometry.page_size,
            head_dim=geometry.head_dim,
            itemsize=itemsize,
        )


def digest_of(data: memoryview) -> Digest:
    """Tells bytes from those that were written: against accidents, not against somebody who wants to deceive."""
    # Loaded only where there is storage.
    from xxhash import xxh3_128

    return xxh3_128(data).digest()


def _meets(wanted: range, first: int, count: int) -> bool:
    return max(wanted.start, first) < min(wanted.stop, first + count)
