"""Which bytes move where: the pages a CP rank sends, and the spans between two page pools. Pure arithmetic."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.spec.kv import PoolLayout
from cluster.spec.ranks import head_copies, kv_heads_of, stage_layers
from cluster.spec.registry import PageFilter, RankCoords, RankRow, TransferMode
from transfer import layout


class Span(NamedTuple):
    """One contiguous range of bytes to copy; offsets count from the start of each pool."""

    source_offset: int
    target_offset: int
    num_bytes: int


PagePair = tuple[int, int]
"""Page id in the source replica, page id in the target pool."""


def is_sender(mode: TransferMode, cp_rank: int) -> bool:
    """Whether a CP rank sends KV at all, and so ends every transfer with a Done."""
    return mode is TransferMode.ALL_RANKS or cp_rank == 0


def receivers(mode: TransferMode, coords: RankCoords, sizes: RankCoords, targets: Sequence[RankRow]) -> list[RankRow]:
    """The decode ranks that a prefill rank sends to: those with some of its heads and layers; none if it sends nothing.

    Where several ranks of a side hold the same head, each decode rank gets its pages from one prefill rank, and copies
    take turns: what copy c of a head in decode takes comes from copy c modulo their number in prefill.
    """
    if not is_sender(mode, coords.cp):
        return []
    return [
        target for target in targets if _sends_heads(coords, sizes, target) and _shares_layers(coords, sizes, target)
    ]


@dataclass(frozen=True, slots=True)
class PageShare:
    """The pages that are sent to any of some decode ranks, if their heads and layers are.

    Of the ranks that hold the same head each is sent its part of the pages, and has the rest from the others.
    """

    num_copies: int
    turns: frozenset[int]

    @staticmethod
    def of(targets: Sequence[RankRow]) -> "PageShare":
        """Of ranks of one replica."""
        num_copies = copies_of(targets[0]) if targets else 1
        return PageShare(num_copies, frozenset(row.coords.tp % num_copies for row in targets))

    @property
    def is_all(self) -> bool:
        """Whether no page is left out, as where no two ranks hold the same head."""
        return len(self.turns) == self.num_copies

    def has(self, page: int) -> bool:
        """Whether a page, by its id in decode, is among them."""
        return page % self.num_copies in self.turns

    def count(self, pages: Sequence[int]) -> int:
        """How many of these are."""
        return len(pages) if self.is_all else sum(map(self.has, pages))


def copies_of(row: RankRow) -> int:
    """Ranks of a replica that hold the same KV heads as this one, itself included."""
    return head_copies(row.geometry.num_kv_heads, row.sizes.tp)


def _sends_heads(coords: RankCoords, sizes: RankCoords, target: RankRow) -> bool:
    num_heads = target.geometry.num_kv_heads
    copies = head_copies(num_heads, sizes.tp)
    is_its_turn = target.coords.tp % copies_of(target) % copies == coords.tp % copies
    heads = kv_heads_of(num_heads, sizes.tp, coords.tp)
    return is_its_turn and bool(layout.intersect(heads, layout.heads(target.layout)))


def _shares_layers(coords: RankCoords, sizes: RankCoords, target: RankRow) -> bool:
    layers = stage_layers(target.geometry.num_layers, sizes.pp, coords.pp)
    return bool(layout.intersect(layers, layout.layers(target.layout)))


def owned_pages(
    page_filter: PageFilter,
    mode: TransferMode,
    *,
    num_pages: int,
    cp_rank: int,
    cp_size: int,
    base: int,
    first: int = 0,
    last: int | None = None,
) -> range:
    """The pages of one request that a CP rank sends, by their position in the request, ascending.

    Sharded KV is divided by the modular filter over all ranks: there it says which pages a rank holds at all.

    Args:
        num_pages: pages of the whole request, held ones included; the contiguous filter divides these.
        base: owner of page 0 under the modular filter.
        first: leave out the pages before this one (decode holds them already).
        last: leave out this page and those after it; none by default.
    """
    assert 0 <= cp_rank < cp_size, f"cp_rank {cp_rank} of {cp_size}"
    end = num_pages if last is None else min(last, num_pages)
    if mode is TransferMode.RANK0:
        return range(first, max(first, end)) if cp_rank == 0 else range(0)
    if page_filter is PageFilter.CONTIGUOUS:
        part, rest = divmod(num_pages, cp_size)
        start = cp_rank * part + min(cp_rank, rest)
        return layout.intersect(range(start, start + part + (cp_rank < rest)), range(first, max(first, end)))
    # Page j belongs to (base + j) mod cp: the first such j from `first` on, then every cp-th.
    return range(first + (cp_rank - base - first) % cp_size, end, cp_size)


def local_page(row: RankRow, page: int) -> int:
    """Where a page of the replica is in the pool of one of its ranks, which must hold it."""
    num_owners = row.num_owners
    assert num_owners == 1 or page % num_owners == row.coords.cp, f"page {page} is not one of cp_rank {row.coords.cp}"
    return page // num_owners


def make_spans(
    source: PoolLayout,
    target: PoolLayout,
    pages: Iterable[PagePair],
    *,
    first_layer: int = 0,
    last_layer: int | None = None,
) -> list[Span]:
    """The spans that copy pages from one pool to another, for the heads and layers that both hold.

    Neighbours on both sides are joined, so equal layouts give at most one span per page.

    Args:
        first_layer: leave out the model's layers before this one.
        last_layer: leave out this layer and those after it; none by default.
    """
    assert (source.page_size, source.head_dim, source.itemsize) == (
        target.page_size,
        target.head_dim,
        target.itemsize,
    ), f"pools of different geometry: {source} and {target}"
    piece = list(_coalesce(_first_page(source, target, first_layer, last_layer)))
    return list(
        _coalesce(
            Span(
                source_page * source.page_bytes + span.source_offset,
                target_page * target.page_bytes + span.target_offset,
                span.num_bytes,
            )
            for source_page, target_page in pages
            for span in piece
        )
    )


def total_bytes(spans: Iterable[Span]) -> int:
    """Bytes that a list of spans copies."""
    return sum(span.num_bytes for span in spans)


def batches(spans: Sequence[Span], max_spans: int) -> Iterator[Sequence[Span]]:
    """The spans in order, at most so many at a time."""
    return (spans[start : start + max_spans] for start in range(0, len(spans), max_spans))


def _first_page(source: PoolLayout, target: PoolLayout, first_layer: int, last_layer: int | None) -> Iterator[Span]:
    """One span per head that copies page 0 to page 0."""
    layers = layout.intersect(layout.layers(source), layout.layers(target))
    wanted = range(first_layer, layers.stop if last_layer is None else last_layer)
    layers = layout.intersect(layers, wanted)
    if not layers:
        return
    for head in layout.intersect(layout.heads(source), layout.heads(target)):
        yield Span(
            layout.offset(source, 0, head, layers.start),
            layout.offset(target, 0, head, layers.start),
            len(layers) * source.layer_bytes,
        )


def _coalesce(spans: Iterable[Span]) -> Iterator[Span]:
    """Join neighbours that touch on both sides."""
    held: Span | None = None
    for span in spans:
        if held is None:
            held = span
        elif (held.source_offset + held.num_bytes, held.target_offset + held.num_bytes) == span[:2]:
            held = Span(held.source_offset, held.target_offset, held.num_bytes + span.num_bytes)
        else:
            yield held
            held = span
    if held is not None:
        yield held
