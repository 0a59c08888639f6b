"""KV memory of one rank: the pages of all its KV groups. Page ownership is tracked elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor

from cluster.spec.kv import GroupLayout, KvGeometry, PoolLayout
from cluster.spec.pool import page_layout
from cluster.spec.registry import RankCoords
from transfer.page_range import PageRange
from workers.device import has_kernels
from workers.kernels.elementwise import KvSlots, elementwise_kernels
from workers.memory.copy import PageMemory
from workers.memory.layerwise_load import LayerwiseLoad

OnStored = Callable[[int], None]
"""Callback with a layer's index in the rank's stage."""


class PagePool(PageMemory):
    """Pages of one rank.

    A slot number is page * page_size + slot in the page. The null page, at index ``num_pages``, takes padding writes
    and is never read. Layers are counted from the first of the rank's pipeline stage.
    """

    def __init__(self, layout: PoolLayout, memory: Tensor | None = None, device: torch.device | None = None) -> None:
        """Lay the pool over ``memory`` (flat uint8, at least ``layout.pool_bytes``), or over zeroed memory."""
        if memory is None:
            memory = torch.zeros(layout.pool_bytes, dtype=torch.uint8, device=device or torch.device("cpu"))
        assert len(memory) >= layout.pool_bytes, f"a pool of {layout.pool_bytes} bytes does not fit into {len(memory)}"
        super().__init__(memory[: layout.pool_bytes], layout)
        self.num_pages = layout.num_pages
        self.page_size = layout.page_size
        self.page_bytes = layout.page_bytes
        self._groups = {group.name: _group_view(self.bytes, layout, group) for group in layout.groups}
        self._layers = _attention_layers(layout, self._groups)
        self._lifetimes = _attention_lifetimes(layout)
        self._load: LayerwiseLoad | None = None
        self._on_stored: OnStored | None = None

    @classmethod
    def of_one_rank(cls, geometry: KvGeometry, num_pages: int, device: torch.device | None = None) -> Self:
        """Return the pool of a rank that holds the whole model."""
        one = RankCoords(dp=1, cp=1, tp=1, pp=1)
        return cls(page_layout(geometry, one, RankCoords(dp=0, cp=0, tp=0, pp=0), num_pages), device=device)

    @property
    def null_slot(self) -> int:
        """Slot of the null page that takes padding writes."""
        return self.num_pages * self.page_size

    def group(self, name: str) -> Tensor:
        """Return the pages of one KV group as ``[page, head, layer, part, slot, dim]``, null page included."""
        return self._groups[name]

    @property
    def num_lifetimes(self) -> int:
        """Return the number of lifetimes of the whole model."""
        return self.layout.num_lifetimes

    def lifetime_of(self, layer: int) -> int:
        """Return the index of the lifetime of one layer's K and V."""
        return self._lifetimes[layer]

    def layer_pages(self, layer: int) -> Tensor:
        """Return the K and V of one layer as a strided view ``[page, head, part, slot, dim]``."""
        return self._layers[layer]

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Store ``kv [N, 2, heads, dim]`` of one layer at ``slots [N]`` int64; only the null slot may repeat."""
        self.at_slots(slots).write(layer, kv)

    def place(self, layer: int, slots: Tensor) -> KvSlots | None:
        """Return where a kernel that computes K and V stores them; None where there are no kernels."""
        return KvSlots(self.layer_pages(layer), slots) if has_kernels(self.bytes) else None

    def at_slots(self, slots: Tensor) -> "PoolSlots":
        """Return a writer of all layers of a step, which go to the same slots."""
        return PoolSlots(self, slots)

    @contextmanager
    def in_step(self, load: LayerwiseLoad | None, on_stored: OnStored | None = None) -> Iterator[None]:
        """Return K and V of one layer as a strided view ``[page, head, part, slot, dim]``."""
        self._load, self._on_stored = load, on_stored
        try:
            yield
            self._wait_for(self.layout.num_layers - 1)
        finally:
            self._load = self._on_stored = None

    def note_stored(self, layer: int) -> None:
        """Report that the step at hand writes no more of this layer."""
        if self._on_stored is not None:
            self._on_stored(layer)

    def read_pages(self, layer: int, pages: Tensor, out: Tensor) -> None:
        """Return the slots where a kernel that computes K and V stores them; None where there are no kernels."""
        self._wait_for(layer)
        in_token_order = self.layer_pages(layer).permute(0, 3, 2, 1, 4)
        torch.index_select(in_token_order, 0, pages, out=out.view(len(pages), *in_token_order.shape[1:]))

    def layer_view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return K and V of one layer, each a strided view ``[page, head, slot, dim]`` that includes the null page."""
        self._wait_for(layer)
        pages = self.layer_pages(layer)
        return pages[:, :, 0], pages[:, :, 1]

    def _wait_for(self, layer: int) -> None:
        if self._load is not None:
            self._load.wait_for(layer)


class PoolSlots:
    """Slots of a pool that a step writes K and V of every layer to."""

    def __init__(self, pool: PagePool, slots: Tensor) -> None:
        self._pool, self._slots = pool, slots
        self._rows: dict[tuple[int, ...], Tensor] = {}
        """Target rows by the strides of a layer."""

    def write(self, layer: int, kv: Tensor) -> None:
        """Store ``kv [N, 2, heads, dim]`` of one layer."""
        pages = self._pool.layer_pages(layer)
        if (kernels := elementwise_kernels(pages)) is not None:
            kernels.store_kv(pages, self._slots, kv)
            return
        dim = pages.shape[-1]
        if any(stride % dim for stride in (*pages.stride()[:4], pages.storage_offset())):
            slots = pages.permute(0, 3, 2, 1, 4)
            slots[self._slots // self._pool.page_size, self._slots % self._pool.page_size] = kv
            return
        # Treat a token's heads as rows of all memory after the layer's first: twice as fast as the assignment above.
        num_rows = (pages.untyped_storage().nbytes() // pages.itemsize - pages.storage_offset()) // dim
        heads = torch.as_strided(pages, (num_rows, dim), (dim, 1))
        rows = self._rows_of(pages)
        _words_of(heads).index_copy_(0, rows, _words_of(kv.reshape(len(rows), dim)))

    def _rows_of(self, pages: Tensor) -> Tensor:
        """Return the rows of the slots, from the layer's first."""
        if pages.stride() not in self._rows:
            page, head, which, slot = (stride // pages.shape[-1] for stride in pages.stride()[:4])
            heads = torch.arange(pages.shape[1]) * head + torch.arange(2)[:, None] * which
            page_size = self._pool.page_size
            first = self._slots // page_size * page + self._slots % page_size * slot
            self._rows[pages.stride()] = (first[:, None] + heads.view(-1)).view(-1)
        return self._rows[pages.stride()]


def _group_view(memory: Tensor, layout: PoolLayout, group: GroupLayout) -> Tensor:
    """Return ``[page, head, layer, part, slot, dim]`` of a group, or ``[page, head, layer, byte]`` of unlike parts."""
    (view,) = PageRange(layout, (), groups=[group.name], lifetime=group.lifetime).views(memory)
    # Whole pages are one piece, which may end in bytes that other lifetimes need.
    view = view[..., : group.num_bytes].view(len(memory), group.num_heads, len(group.layers), group.layer_bytes)
    shapes = {(part.dim, part.dtype) for part in group.parts}
    if len(shapes) > 1:
        return view
    dim, dtype = shapes.pop()
    elements = view.view(getattr(torch, dtype))
    return elements.view(*elements.shape[:3], len(group.parts), layout.page_size, dim)


def _attention_layers(layout: PoolLayout, groups: dict[str, Tensor]) -> dict[int, Tensor]:
    """Return the pages of K and V by layer; a layer that stores several groups attends to the first one."""
    layers: dict[int, Tensor] = {}
    for group in layout.groups:
        for index, layer in enumerate(group.layers):
            layers.setdefault(layer - layout.first_layer, groups[group.name][:, :, index])
    return layers


def _attention_lifetimes(layout: PoolLayout) -> dict[int, int]:
    lifetimes: dict[int, int] = {}
    for group in layout.groups:
        for layer in group.layers:
            lifetimes.setdefault(layer - layout.first_layer, group.lifetime)
    return lifetimes


def _words_of(rows: Tensor) -> Tensor:
    """Return the same bytes in the largest words that make up a row, since a copy goes word by word."""
    num_bytes = rows.shape[1] * rows.itemsize
    word = next(word for word in (torch.int64, torch.int32, torch.int16, torch.int8) if num_bytes % word.itemsize == 0)
    return rows.view(word)
