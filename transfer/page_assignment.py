"""Assignment of a transfer's pages to ranks: which rank sends which pages where, and when. Pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.spec.kv import KvGroup, PoolLayout
from cluster.spec.ranks import head_copies, kv_heads_of, stage_layers
from cluster.spec.registry import AxisSizes, RankCoords, RankRow, TransferMode
from transfer.page_range import intersect

MOST_GROUPS = 4
"""Maximum number of layer groups. Only the last one, a quarter of the bytes, is sent after the step ends."""
LEAST_SPAN_BYTES = 64 << 10
"""Minimum span size for early sending; smaller spans cost more time than they hide."""


def early_ends(layout: PoolLayout, least_span_bytes: int = LEAST_SPAN_BYTES) -> list[int]:
    """Return the numbers of stored layers after which a rank sends early; empty if it sends all layers together."""
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
    mode: TransferMode, coords: RankCoords, sizes: AxisSizes, decode_ranks: Sequence[RankRow]
) -> list[RankRow]:
    """Return the decode ranks to which a prefill rank sends heads and layers, ending each transfer with a Done."""
    if mode is TransferMode.RANK0 and coords.cp != 0:
        return []
    return [rank for rank in decode_ranks if sent_groups(coords, sizes, rank)]


def sent_groups(coords: RankCoords, sizes: AxisSizes, decode_rank: RankRow) -> list[str]:
    """Return the KV groups whose heads and layers a prefill rank sends to a decode rank.

    If several prefill ranks hold the same head, they take turns: copy c of the head in decode is sent by prefill copy
    c modulo their number.
    """
    layers = set(stage_layers(decode_rank.geometry.num_layers, sizes.pp, coords.pp)).intersection(
        decode_rank.layout.layers
    )
    return [
        group.name
        for group in decode_rank.geometry.groups
        if layers.intersection(group.layers) and _sends_heads(group, coords, sizes, decode_rank)
    ]


def _sends_heads(group: KvGroup, coords: RankCoords, sizes: AxisSizes, decode_rank: RankRow) -> bool:
    source_copies = head_copies([group.num_heads], sizes.tp)
    target_copies = head_copies([group.num_heads], decode_rank.sizes.tp)
    if decode_rank.coords.tp % target_copies % source_copies != coords.tp % source_copies:
        return False
    source_heads = kv_heads_of(group.num_heads, sizes.tp, coords.tp)
    target_heads = kv_heads_of(group.num_heads, decode_rank.sizes.tp, decode_rank.coords.tp)
    return bool(intersect(source_heads, target_heads))


@dataclass(frozen=True, slots=True)
class PageShare:
    """Part of the pages that one rank sends to some decode ranks.

    If ``num_copies`` decode ranks hold the same KV heads, each is sent the pages whose id modulo ``num_copies`` is its
    own remainder, and gets the others from its peers.
    """

    num_copies: int
    remainders: frozenset[int]
    """Remainders of the sent page ids modulo ``num_copies``."""

    @staticmethod
    def of(ranks: Sequence[RankRow]) -> "PageShare":
        """Return the share for these ranks of one replica."""
        num_copies = copies_of(ranks[0]) if ranks else 1
        return PageShare(num_copies, frozenset(row.coords.tp % num_copies for row in ranks))

    def has(self, page: int) -> bool:
        """Return whether a page is sent, by its id in decode."""
        return page % self.num_copies in self.remainders

    def count(self, pages: Sequence[int]) -> int:
        return sum(map(self.has, pages))


def copies_of(row: RankRow) -> int:
    """Return how many ranks of a replica hold the same KV heads as this one, including itself."""
    return head_copies((group.num_heads for group in row.geometry.groups), row.sizes.tp)


def owned_pages(
    mode: TransferMode,
    *,
    num_pages: int,
    cp_rank: int,
    cp_size: int,
    base: int,
    first: int = 0,
) -> range:
    """Return the positions in a request of the pages that a CP rank sends.

    Page j belongs to rank (base + j) mod cp, so a growing prompt never changes an owner. With sharded KV a rank holds
    the same pages.

    Args:
        base: owner of page 0.
        first: first page that decode does not hold already.
    """
    assert 0 <= cp_rank < cp_size, f"cp_rank {cp_rank} of {cp_size}"
    if mode is TransferMode.RANK0:
        return range(first, max(first, num_pages)) if cp_rank == 0 else range(0)
    return range(first + (cp_rank - base - first) % cp_size, num_pages, cp_size)


def local_page(row: RankRow, page: int) -> int:
    """Return a page's index in the pool of one rank, which must hold it."""
    num_owners = row.num_owners
    assert num_owners == 1 or page % num_owners == row.coords.cp, f"page {page} is not one of cp_rank {row.coords.cp}"
    return page // num_owners
