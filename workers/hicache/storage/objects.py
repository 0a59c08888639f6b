"""What a page is called in storage, and the header that proves that an object is this page. No I/O."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from cluster.spec.kv import KvGeometry, PoolLayout
from cluster.spec.ranks import head_copies, kv_heads_of, stage_layers
from cluster.spec.registry import KvOwnership, RankCoords

LAYOUT_VERSION = 3
"""Of names, marks, headers and the order of bytes in a page; a change makes everything stored before unknown."""
HEADER_BYTES = 256
MARK_BYTES = 64

Digest = bytes
_MARK = re.compile(rb"([a-z]+)-cp([1-9]\d*)-tp([1-9]\d*)-pp([1-9]\d*)\0+")


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

    def mark(self, number: int) -> str:
        """The name of an object that says of which cut there are pages."""
        return f"{self.namespace()}/cut.{number}"

    def mark_of(self, cut: Cut) -> bytes:
        """What such an object says."""
        return f"{cut.ownership}-cp{cut.cp}-tp{cut.tp}-pp{cut.pp}".encode().ljust(MARK_BYTES, b"\0")

    def cut_of(self, mark: bytes) -> Cut | None:
        """What it stands for; None for a cut that this model cannot have, as far as we know."""
        match = _MARK.fullmatch(mark)
        if match is None or match[1].decode() not in set(KvOwnership):
            return None
        cut = Cut(KvOwnership(match[1].decode()), *map(int, match.groups()[1:]))
        return cut if self.allows(cut) else None

    def allows(self, cut: Cut) -> bool:
        """Whether heads and layers can be divided so."""
        kv_heads = self.geometry.num_kv_heads
        return cut.pp <= self.geometry.num_layers and (kv_heads % cut.tp == 0 or cut.tp % kv_heads == 0)

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
