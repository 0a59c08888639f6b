"""Assignment of pages to ranks: which rank sends which pages to which rank. Pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.spec.kv import KvGroup, PoolLayout
from cluster.spec.ranks import head_copies, kv_heads_of, stage_layers
from cluster.spec.registry import AxisSizes, RankCoords, RankRecord, TransferMode
from transfer.page_range import intersect

MOST_GROUPS = 4
"""Maximum number of layer groups. The last one, a quarter of the bytes, is sent after the step ends."""
LEAST_SPAN_BYTES = 64 << 10
"""Minimum span size for early sending. Smaller spans cost more time than early sending saves."""


def early_ends(layout: PoolLayout, least_span_bytes: int = LEAST_SPAN_BYTES) -> list[int]:
    """Return the layer counts at which a rank sends the layers stored so far. Empty if all layers are sent together."""
    least = -(-least_span_bytes // min(group.layer_bytes for group in layout.groups))
    size = max(least, -(-layout.num_layers // MOST_GROUPS))
    return list(range(size, layout.num_layers - least + 1, size))


class PagePair(NamedTuple):
    """One page to send."""

    lifetime: int
    source: int
    """Page id in the source replica."""
    target: int
    """Page id in the target pool."""


def receivers(
    mode: TransferMode, coords: RankCoords, sizes: AxisSizes, decode_ranks: Sequence[RankRecord]
) -> list[RankRecord]:
    """Return the decode ranks to which a prefill rank sends KV and then a Done."""
    if mode is TransferMode.RANK0 and coords.cp != 0:
        return []
    return [rank for rank in decode_ranks if sent_groups(coords, sizes, rank)]


def sent_groups(coords: RankCoords, sizes: AxisSizes, decode_rank: RankRecord) -> list[str]:
    """Return the KV groups that a prefill rank sends, in part or in full, to a decode rank.

    If n prefill ranks hold copies of the same head, prefill copy c % n sends to decode copy c.
    """
    layers = set(stage_layers(decode_rank.geometry.num_layers, sizes.pp, coords.pp)).intersection(
        decode_rank.layout.layers
    )
    return [
        group.name
        for group in decode_rank.geometry.groups
        if layers.intersection(group.layers) and _sends_heads(group, coords, sizes, decode_rank)
    ]


def _sends_heads(group: KvGroup, coords: RankCoords, sizes: AxisSizes, decode_rank: RankRecord) -> bool:
    source_copies = head_copies([group.num_heads], sizes.tp)
    target_copies = head_copies([group.num_heads], decode_rank.sizes.tp)
    if decode_rank.coords.tp % target_copies % source_copies != coords.tp % source_copies:
        return False
    source_heads = kv_heads_of(group.num_heads, sizes.tp, coords.tp)
    target_heads = kv_heads_of(group.num_heads, decode_rank.sizes.tp, decode_rank.coords.tp)
    return bool(intersect(source_heads, target_heads))


@dataclass(frozen=True, slots=True)
class PageShare:
    """Part of a request's pages that one prefill rank sends to some decode ranks.

    If ``num_copies`` decode ranks hold the same KV heads, prefill sends page p only to the rank whose TP rank modulo
    ``num_copies`` equals p modulo ``num_copies``. The other ranks copy the page from that one.
    """

    num_copies: int
    remainders: frozenset[int]
    """Values of ``page % num_copies`` for the pages that are sent."""

    @staticmethod
    def of(ranks: Sequence[RankRecord]) -> "PageShare":
        """Return the part of the pages that these ranks of one replica receive."""
        num_copies = copies_of(ranks[0]) if ranks else 1
        return PageShare(num_copies, frozenset(record.coords.tp % num_copies for record in ranks))

    def has(self, page: int) -> bool:
        """Return whether the page with this id in the decode replica's pools is sent."""
        return page % self.num_copies in self.remainders

    def count(self, pages: Sequence[int]) -> int:
        return sum(map(self.has, pages))


def copies_of(record: RankRecord) -> int:
    """Return the number of ranks, including this one, that hold the same KV heads in a replica."""
    return head_copies((group.num_heads for group in record.geometry.groups), record.sizes.tp)


class HostShare(NamedTuple):
    """Part of a replica's host pages that one rank keeps and stores: those with ``index % num_owners == owner``.

    Ranks that hold the same heads, layers and tokens keep one copy between them.
    """

    owner: int
    num_owners: int

    @staticmethod
    def of(record: RankRecord) -> "HostShare":
        copies, coords, cp = copies_of(record), record.coords, record.sizes.cp
        # Modulo cp, owners of host pages are owners of device pages.
        return HostShare(coords.cp + cp * (coords.tp % copies), cp * copies)

    def has(self, index: int) -> bool:
        return index % self.num_owners == self.owner


def owned_pages(
    mode: TransferMode,
    *,
    num_pages: int,
    cp_rank: int,
    cp_size: int,
    base: int,
    first: int = 0,
) -> range:
    """Return the indices, within a request, of the pages that a CP rank sends.

    Page j belongs to rank (base + j) mod cp, so pages keep their owners as a prompt grows. With sharded KV, the owner
    is also the rank that holds page j.

    Args:
        base: rank that owns page 0.
        first: first page that decode does not already hold.
    """
    assert 0 <= cp_rank < cp_size, f"cp_rank {cp_rank} of {cp_size}"
    if mode is TransferMode.RANK0:
        return range(first, max(first, num_pages)) if cp_rank == 0 else range(0)
    return range(first + (cp_rank - base - first) % cp_size, num_pages, cp_size)


def local_page(record: RankRecord, page: int) -> int:
    """Return the index of a page in the pool of the rank that holds it."""
    num_owners = record.num_owners
    assert num_owners == 1 or page % num_owners == record.coords.cp, (
        f"page {page} is not one of cp_rank {record.coords.cp}"
    )
    return page // num_owners
