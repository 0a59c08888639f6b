"""What a page is called in storage, and the header that proves that an object is this page. No I/O."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from cluster.spec.kv import GroupLayout, KvGeometry, PoolLayout
from cluster.spec.pool import page_layout
from cluster.spec.ranks import head_copies
from cluster.spec.registry import KvOwnership, RankCoords
from transfer.page_range import PageRange

LAYOUT_VERSION = 3
"""Of names, marks, headers and the order of bytes in a page; a change makes everything stored before unknown."""
HEADER_BYTES = 256
MARK_BYTES = 64

Digest = bytes
_MARK = re.compile(rb"([a-z]+)-cp([1-9]\d*)-tp([1-9]\d*)-pp([1-9]\d*)\0+")


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    namespace: str
    key: bytes
    groups: tuple[GroupLayout, ...]
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
            geometry.num_layers,
            geometry.groups,
            geometry.page_size,
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
        heads = [group.num_heads for group in self.geometry.groups]
        return cut.pp <= self.geometry.num_layers and all(n % cut.tp == 0 or cut.tp % n == 0 for n in heads)

    def parts(self, cut: Cut, key: bytes, place: int, own: PoolLayout) -> Iterator[StoredPart]:
        """The objects that replicas of a cut keep some of these heads and layers of a page in."""
        namespace = self.namespace(cut.ownership)
        for pp_rank in range(cut.pp):
            for tp_rank in range(0, cut.tp, head_copies((group.num_heads for group in self.geometry.groups), cut.tp)):
                layout = self._layout(cut, tp_rank, pp_rank)
                if PageRange(layout, [0]).spans_to(PageRange(own, [0])):
                    rank = f"cp{place % cut.cp}of{cut.cp}-tp{tp_rank}of{cut.tp}-pp{pp_rank}of{cut.pp}"
                    yield StoredPart(f"{namespace}/{key.hex()}.{rank}", namespace, layout)

    def header(self, part: StoredPart, key: bytes, digest: Digest) -> bytes:
        """The first bytes of an object: two of length, MessagePack, zeros."""
        layout = part.layout
        header = _Header(
            namespace=part.namespace,
            key=key,
            groups=layout.groups,
            digest=digest,
        )
        packed = msgspec.msgpack.encode(header)
        return (len(packed).to_bytes(2, "little") + packed).ljust(HEADER_BYTES, b"\0")

    def _layout(self, cut: Cut, tp_rank: int, pp_rank: int) -> PoolLayout:
        sizes = RankCoords(dp=1, cp=cut.cp, tp=cut.tp, pp=cut.pp)
        return page_layout(self.geometry, sizes, RankCoords(dp=0, cp=0, tp=tp_rank, pp=pp_rank))


def digest_of(data: memoryview) -> Digest:
    """Tells bytes from those that were written: against accidents, not against somebody who wants to deceive."""
    # Loaded only where there is storage.
    from xxhash import xxh3_128

    return xxh3_128(data).digest()
