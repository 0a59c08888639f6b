"""Byte layout of pages, known only to this module. Pure arithmetic."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from cluster.spec.kv import GroupLayout, PoolLayout


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
        """Return spans that copy each page to the target page at the same index, for the heads that both have.

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
        """Return a view ``[page, head, layer, byte]`` of all pages in a memory for each KV group.

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
    """Return a byte offset in a KV group. ``head`` is a number in the model, ``layer`` an index in the group."""
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
