"""KV memory of one rank: the pages of all its KV groups. Other modules track who holds which page."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

import torch
from torch import Tensor

from cluster.spec.kv import GroupLayout, KvGeometry, PoolLayout
from cluster.spec.memory import page_layout
from cluster.spec.registry import AxisSizes, RankCoords
from transfer.page_range import PageRange
from workers.kernels.elementwise import KvSlots, elementwise_kernels
from workers.memory.copy import PageMemory
from workers.memory.layerwise_load import LayerwiseLoad

OnStored = Callable[[int], None]
"""Callback that receives a layer's index in the rank's stage."""


class PagePool(PageMemory):
    """Pages of one rank.

    A slot number is page * page_size + slot in the page. The null page, at index ``num_pages``, receives padding
    writes and is never read. Layers are counted from the first layer of the rank's pipeline stage.
    """

    def __init__(self, layout: PoolLayout, memory: Tensor | None = None, device: torch.device | None = None) -> None:
        """Build the pool in ``memory`` (flat uint8, at least ``layout.pool_bytes``), or in new zeroed memory."""
        if memory is None:
            memory = torch.zeros(layout.pool_bytes, dtype=torch.uint8, device=device or torch.device("cpu"))
        assert len(memory) >= layout.pool_bytes, f"a pool of {layout.pool_bytes} bytes does not fit into {len(memory)}"
        super().__init__(memory[: layout.pool_bytes], layout)
        self.num_pages = layout.num_pages
        self.page_size = layout.page_size
        self.page_bytes = layout.page_bytes
        self._groups = {group.name: _group_view(self.bytes, layout, group) for group in layout.groups}
        self._layers = _attention_layers(self.bytes, layout)
        self._load: LayerwiseLoad | None = None
        self._on_stored: OnStored | None = None

    @classmethod
    def of_one_rank(cls, geometry: KvGeometry, num_pages: int, device: torch.device | None = None) -> Self:
        one = AxisSizes(dp=1, cp=1, tp=1, pp=1)
        return cls(page_layout(geometry, one, RankCoords(dp=0, cp=0, tp=0, pp=0), num_pages), device=device)

    @property
    def null_slot(self) -> int:
        return self.num_pages * self.page_size

    def group(self, name: str) -> Tensor:
        """Return one KV group as ``[page, head, layer, part, slot, dim]``, including the null page."""
        return self._groups[name]

    @property
    def num_lifetimes(self) -> int:
        return self.layout.num_lifetimes

    def lifetime_of(self, layer: int) -> int:
        return self._layers[layer].lifetime

    def layer_pages(self, layer: int) -> Tensor | None:
        """Return a layer's K and V as one view ``[page, head, 2, slot, dim]``. None if it has no two equal parts."""
        return self._layers[layer].joint

    def row_shape(self, layer: int) -> tuple[int, int]:
        """Return the shape of one token's KV in a layer: number of heads, and total width of the parts."""
        layer_pages = self._layers[layer]
        return layer_pages.parts[0].shape[1], sum(layer_pages.widths)

    def split(self, layer: int, kv: Tensor) -> tuple[Tensor, ...]:
        """Split ``kv [..., width]`` into views of the layer's parts, such as K and V."""
        return tuple(kv.split_with_sizes(self._layers[layer].widths, -1))

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Store rows ``kv [N, heads, width]`` of one layer at ``slots [N]`` int64. Only the null slot may repeat."""
        pages = self.layer_pages(layer)
        if pages is not None and (kernels := elementwise_kernels(pages)) is not None:
            kernels.store_kv(pages, slots, kv.view(*kv.shape[:2], 2, pages.shape[-1]).transpose(1, 2))
            return
        page, slot = slots // self.page_size, slots % self.page_size
        for view, rows in zip(self._layers[layer].parts, self.split(layer, kv), strict=True):
            view.transpose(1, 2)[page, slot] = rows

    def kv_slots(self, layer: int, slots: Tensor) -> KvSlots | None:
        """Return the slots for a kernel that computes and stores K and V. None if no such kernel can be used."""
        pages = self.layer_pages(layer)
        return KvSlots(pages, slots) if pages is not None and elementwise_kernels(pages) is not None else None

    @contextmanager
    def in_step(self, load: LayerwiseLoad | None, on_stored: OnStored | None = None) -> Iterator[None]:
        """Make readers of a layer wait for its ``load``, and report each stored layer to ``on_stored``."""
        self._load, self._on_stored = load, on_stored
        try:
            yield
            self._wait_for(self.layout.num_layers - 1)
        finally:
            self._load = self._on_stored = None

    def note_stored(self, layer: int) -> None:
        """Report that the current step has stored a layer."""
        if self._on_stored is not None:
            self._on_stored(layer)

    def read_pages(self, layer: int, pages: Tensor, out: Tensor) -> None:
        """Copy the KV of a layer's pages to rows ``out [slots, heads, width]``, in order of position."""
        rows = self.split(layer, out.view(len(pages), self.page_size, *out.shape[1:]))
        for view, target in zip(self.layer_view(layer), rows, strict=True):
            torch.index_select(view.transpose(1, 2), 0, pages, out=target)

    def layer_view(self, layer: int) -> tuple[Tensor, ...]:
        """Return a layer's parts, such as K and V, as strided views ``[page, head, slot, dim]`` with the null page."""
        self._wait_for(layer)
        return self._layers[layer].parts

    def _wait_for(self, layer: int) -> None:
        if self._load is not None:
            self._load.wait_for(layer)


class _LayerPages(NamedTuple):
    """Views of the KV to which one layer attends, including the null page."""

    parts: tuple[Tensor, ...]
    """``[page, head, slot, dim]`` each."""
    joint: Tensor | None
    """``[page, head, 2, slot, dim]``; None if there are not two parts of equal width."""
    lifetime: int

    @property
    def widths(self) -> list[int]:
        return [part.shape[-1] for part in self.parts]


def _group_bytes(memory: Tensor, layout: PoolLayout, group: GroupLayout) -> Tensor:
    """Return a group as ``[page, head, layer, byte]``."""
    (view,) = PageRange(layout, (), groups=[group.name], lifetime=group.lifetime).views(memory)
    # A page may end in bytes that only other lifetimes use.
    return view[..., : group.num_bytes].view(len(memory), group.num_heads, len(group.layers), group.layer_bytes)


def _group_view(memory: Tensor, layout: PoolLayout, group: GroupLayout) -> Tensor:
    """Return a group as ``[page, head, layer, part, slot, dim]``, or ``[page, head, layer, byte]`` if parts differ."""
    view = _group_bytes(memory, layout, group)
    if len({(part.dim, part.dtype) for part in group.parts}) > 1:
        return view
    part = group.parts[0]
    elements = view.view(getattr(torch, part.dtype))
    return elements.view(*view.shape[:3], len(group.parts), layout.page_size, part.dim)


def _part_views(memory: Tensor, layout: PoolLayout, group: GroupLayout) -> list[Tensor]:
    """Return each part of a group as ``[page, head, layer, slot, dim]``."""
    whole = _group_bytes(memory, layout, group)
    parts = whole.split_with_sizes([layout.page_size * part.slot_bytes for part in group.parts], -1)
    return [
        view.view(getattr(torch, part.dtype)).view(*whole.shape[:3], layout.page_size, part.dim)
        for view, part in zip(parts, group.parts, strict=True)
    ]


def _attention_layers(memory: Tensor, layout: PoolLayout) -> dict[int, _LayerPages]:
    """Return views of KV by layer. A layer that stores several groups attends to the first group."""
    layers: dict[int, _LayerPages] = {}
    for group in layout.groups:
        whole, parts = _group_view(memory, layout, group), _part_views(memory, layout, group)
        is_joint = whole.ndim == 6 and len(parts) == 2
        for index, layer in enumerate(group.layers):
            if layer - layout.first_layer not in layers:
                views = tuple(part[:, :, index] for part in parts)
                joint = whole[:, :, index] if is_joint else None
                layers[layer - layout.first_layer] = _LayerPages(views, joint, group.lifetime)
    return layers
