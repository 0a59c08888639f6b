"""Offsets of pages, heads and layers, computed only here, and digests of transferred pages. Pure arithmetic."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from xxhash import xxh3_128

from cluster.spec.errors import TransferError
from cluster.spec.kv import GroupLayout, PoolLayout
from cluster.spec.registry import Endpoint
from cluster.spec.transfer_messages import PageDigests


class Span(NamedTuple):
    """Contiguous range of bytes to copy. Offsets count from the start of each pool."""

    source_offset: int
    target_offset: int
    num_bytes: int


Item = TypeVar("Item")
Memory = TypeVar("Memory")
"""A torch tensor or numpy array of bytes ``[page, byte]``."""


@dataclass(frozen=True, slots=True)
class PageRange:
    """Pages of one pool, in full or restricted to some layers and KV groups."""

    layout: PoolLayout
    pages: Sequence[int]
    layers: range | None = None
    """Layer numbers in the model; None for all."""
    groups: Collection[str] | None = None
    """Names of KV groups; None for all."""
    lifetime: int = 0
    """Index of the lifetime whose KV groups the pages hold."""

    @property
    def is_whole(self) -> bool:
        whole = [group for group, _, layers in self._shards() if len(layers) == len(group.layers)]
        return len(whole) == sum(group.lifetime == self.lifetime for group in self.layout.groups)

    @property
    def num_bytes(self) -> int:
        return len(self.pages) * sum(
            group.num_heads * len(layers) * group.layer_bytes for group, _, layers in self._shards()
        )

    def spans_to(self, target: "PageRange") -> list[Span]:
        """Return spans that copy each page to the target page at the same index, for the heads and layers in both.

        Spans that are adjacent in both pools are joined, so equal layouts yield at most one span per page.
        """
        assert self.layout.page_size == target.layout.page_size, f"page sizes of {self.layout} and {target.layout}"
        assert len(self.pages) == len(target.pages), f"{len(self.pages)} pages to {len(target.pages)}"
        piece = list(_coalesce(self._page_spans(target)))
        source_bytes, target_bytes = self.layout.page_bytes, target.layout.page_bytes
        starts = [
            (page * source_bytes, target_page * target_bytes)
            for page, target_page in zip(self.pages, target.pages, strict=True)
        ]
        return list(
            _coalesce(
                Span(source_start + span.source_offset, target_start + span.target_offset, span.num_bytes)
                for source_start, target_start in starts
                for span in piece
            )
        )

    def views(self, memory: Memory) -> list[Memory]:
        """Return, for each KV group, a view ``[page, head, layer, byte]`` of all pages in ``memory``.

        Unrestricted pages yield a single view ``[page, 1, 1, byte]``.
        """
        pages: Any = memory
        if self.is_whole:
            return [pages.reshape(len(pages), 1, 1, self.layout.page_bytes)]
        found = []
        for group, start, layers in self._shards():
            shape = (len(pages), group.num_heads, len(group.layers), group.layer_bytes)
            found.append(pages[:, start : start + group.num_bytes].reshape(shape)[:, :, layers.start : layers.stop])
        return found

    def _page_spans(self, target: "PageRange") -> Iterator[Span]:
        """Yield the spans that copy one page when both pages start at offset 0."""
        shards = {group.name: (group, start, layers) for group, start, layers in target._shards()}
        for group, start, layers in self._shards():
            if group.name not in shards:
                continue
            theirs, their_start, their_layers = shards[group.name]
            assert group.parts == theirs.parts, f"{group.name}: {group.parts} is not {theirs.parts}"
            others = theirs.layers[their_layers.start : their_layers.stop]
            common = [layer for layer in group.layers[layers.start : layers.stop] if layer in others]
            if not common:
                continue
            source_layer, target_layer = group.layers.index(common[0]), theirs.layers.index(common[0])
            for head in intersect(group.heads, theirs.heads):
                yield Span(
                    start + _offset(group, head, source_layer),
                    their_start + _offset(theirs, head, target_layer),
                    len(common) * group.layer_bytes,
                )

    def _shards(self) -> Iterator[tuple[GroupLayout, int, range]]:
        """Yield each included KV group, its first byte in a page, and the indices of its included layers."""
        start = 0
        for group in self.layout.groups:
            if group.lifetime != self.lifetime:
                continue
            layers = self._layer_indices(group)
            if layers and (self.groups is None or group.name in self.groups):
                yield group, start, layers
            start += group.num_bytes

    def _layer_indices(self, group: GroupLayout) -> range:
        if self.layers is None:
            return range(len(group.layers))
        found = [index for index, layer in enumerate(group.layers) if layer in self.layers]
        return range(found[0], found[-1] + 1) if found else range(0)


def check_bounds(spans: Sequence[Span], source_bytes: int, target_bytes: int, peer: Endpoint) -> None:
    """Check that spans lie within both the source and the target region.

    Raises:
        TransferError: a span is out of bounds.
    """
    for span in spans:
        if span.num_bytes < 0 or not 0 <= span.source_offset <= source_bytes - span.num_bytes:
            raise TransferError(f"{peer.session}: {span} exceeds the {source_bytes} bytes of the source")
        if not 0 <= span.target_offset <= target_bytes - span.num_bytes:
            raise TransferError(f"{peer.session}: {span} exceeds the {target_bytes} bytes of the target")


def intersect(a: range, b: range) -> range:
    """Return the intersection of two ranges of step 1."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def total_bytes(spans: Iterable[Span]) -> int:
    return sum(span.num_bytes for span in spans)


def batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Divide items into batches of at most ``size``."""
    return (items[start : start + size] for start in range(0, len(items), size))


def _offset(group: GroupLayout, head: int, layer: int) -> int:
    """Return a byte offset in a KV group. ``head`` is numbered within the model, ``layer`` within the group."""
    return (head - group.first_head) * group.head_bytes + layer * group.layer_bytes


def _coalesce(spans: Iterable[Span]) -> Iterator[Span]:
    """Join spans that are adjacent in both source and target."""
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


def digest_pages(pool: memoryview, source: PageRange, rank: int, target: PageRange) -> PageDigests:
    """Return a digest per page of the bytes that a sender writes from its pool to one decode rank."""
    piece = replace(source, pages=[0]).spans_to(replace(target, pages=[0]))
    page_bytes = source.layout.page_bytes
    return PageDigests(
        rank=rank,
        spans=[(span.target_offset, span.num_bytes) for span in piece],
        pages=list(target.pages),
        digests=[
            _digest(pool, page * page_bytes, ((span.source_offset, span.num_bytes) for span in piece))
            for page in source.pages
        ],
    )


def wrong_pages(pool: memoryview, layout: PoolLayout, reported: Iterable[PageDigests]) -> list[int]:
    """Return, in ascending order, the ids of pages whose bytes in the receiver's pool do not match the digests."""
    return sorted(
        {
            page
            for part in reported
            for page, digest in zip(part.pages, part.digests, strict=True)
            if _digest(pool, page * layout.page_bytes, part.spans) != digest
        }
    )


def coverage_problem(
    reported: Sequence[PageDigests], pages: Collection[int], num_bytes: int, num_ranks: int, num_copies: int = 1
) -> str | None:
    """Return why digests do not cover every byte of a ticket's pages exactly once, or None if they do.

    Args:
        num_bytes: total bytes of these pages on all ranks. Ranks that hold the same heads count only once.
        num_copies: number of ranks that hold the same heads; each receives its share of the pages.
    """
    ranges = sorted(
        ((part.rank, page), offset, length) for part in reported for page in part.pages for offset, length in part.spans
    )
    if any(len(part.pages) != len(part.digests) for part in reported):
        return "the number of digests differs from the number of pages"
    if unknown := {page for (_, page), _, _ in ranges} - set(pages):
        return f"pages {sorted(unknown)} are not in the ticket"
    if strangers := {part.rank for part in reported if not 0 <= part.rank < num_ranks}:
        return f"ranks {sorted(strangers)} do not exist; allowed: 0 to {num_ranks - 1}"
    # Ranks that hold the same heads have consecutive numbers.
    if astray := {(rank, page) for (rank, page), _, _ in ranges if (rank - page) % num_copies}:
        return f"pages were sent to the wrong ranks; (rank, page): {sorted(astray)}"
    ends: dict[tuple[int, int], int] = {}
    for owner, offset, length in ranges:
        if offset != ends.get(owner, 0) or length <= 0:
            return f"page {owner[1]} of rank {owner[0]}: byte {ends.get(owner, 0)} is not covered exactly once"
        ends[owner] = offset + length
    covered = sum(ends.values())
    return None if covered == num_bytes else f"{covered} of {num_bytes} bytes are covered"


def _digest(pool: memoryview, start: int, spans: Iterable[tuple[int, int]]) -> bytes:
    """Return the XXH3 digest of byte ranges. It is much faster than SHA-256, but not secure against attackers."""
    digest = xxh3_128()
    for offset, length in spans:
        digest.update(pool[start + offset : start + offset + length])
    return digest.digest()
