"""The KV memory of one worker: pages of K and V in one tensor. Which request owns a page is known elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from workers.cache.layer_arrivals import LayerArrivals
from workers.kernel_devices import has_kernels
from workers.kernels.elementwise import KvSlots, elementwise_kernels

OnStored = Callable[[int], None]
"""Told the number of a layer, of those that the pool has."""


class PagePool:
    """Pages as one tensor ``[page, kv_head, layer, k_or_v, slot, head_dim]`` (``data``).

    A slot number is page * page_size + place in the page. One page beyond ``num_pages`` takes padding writes and
    is never read.
    """

    def __init__(
        self,
        num_pages: int,
        num_kv_heads: int,
        num_layers: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        buffer: Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Lay the pool over ``buffer`` (flat uint8, at least (num_pages + 1) pages), or over zeroed memory."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.page_bytes = self.page_bytes_for(num_kv_heads, num_layers, page_size, head_dim, dtype)
        num_bytes = (num_pages + 1) * self.page_bytes
        if buffer is None:
            buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device or torch.device("cpu"))
        assert buffer.dtype == torch.uint8, f"not bytes: {buffer.dtype}"
        assert buffer.ndim == 1, f"not flat: {buffer.shape}"
        assert len(buffer) >= num_bytes, f"a pool of {num_bytes} bytes does not fit into {len(buffer)}"
        shape = (num_pages + 1, num_kv_heads, num_layers, 2, page_size, head_dim)
        self.data = buffer[:num_bytes].view(dtype).view(shape)
        self._arrivals: LayerArrivals | None = None
        self._on_stored: OnStored | None = None

    @staticmethod
    def page_bytes_for(num_kv_heads: int, num_layers: int, page_size: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one page: K and V of all its tokens, layers and heads."""
        return prod((num_kv_heads, num_layers, 2, page_size, head_dim, dtype.itemsize))

    @property
    def trash_slot(self) -> int:
        """The slot that takes padding rows."""
        return self.num_pages * self.page_size

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Store ``kv [N, 2, heads, dim]`` of one layer at ``slots [N]`` int64; only the trash slot may repeat."""
        self.at(slots).write(layer, kv)

    def place(self, layer: int, slots: Tensor) -> KvSlots | None:
        """For a kernel that stores what it computes, instead of ``write``; None where there are no kernels."""
        return KvSlots(self.data[:, :, layer], slots) if has_kernels(self.data) else None

    def at(self, slots: Tensor) -> "PoolSlots":
        """The same for all layers of a step, which write to the same slots."""
        return PoolSlots(self, slots)

    @contextmanager
    def in_step(self, arrivals: LayerArrivals | None, on_stored: OnStored | None = None) -> Iterator[None]:
        """Layers that come meanwhile are waited for when they are read, and all of them at the end.

        Of every layer that the step has stored, or will have once its GPU comes to it, ``on_stored`` is told.
        """
        self._arrivals, self._on_stored = arrivals, on_stored
        try:
            yield
            self._wait_for(self.data.shape[2] - 1)
        finally:
            self._arrivals = self._on_stored = None

    def note_stored(self, layer: int) -> None:
        """The step at hand writes no more of this layer."""
        if self._on_stored is not None:
            self._on_stored(layer)

    def read_pages(self, layer: int, pages: Tensor, out: Tensor) -> None:
        """Copy ``pages [n]`` int64 of one layer, token after token, into ``out [n * page_size, 2, heads, dim]``."""
        self._wait_for(layer)
        in_token_order = self.data[:, :, layer].permute(0, 3, 2, 1, 4)
        torch.index_select(in_token_order, 0, pages, out=out.view(len(pages), *in_token_order.shape[1:]))

    def layer_view(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each a strided view ``[page, head, slot, dim]`` that includes the trash page."""
        self._wait_for(layer)
        return self.data[:, :, layer, 0], self.data[:, :, layer, 1]

    def _wait_for(self, layer: int) -> None:
        if self._arrivals is not None:
            self._arrivals.wait_for(layer)


class PoolSlots:
    """Slots of a pool to which the rows of every layer go."""

    def __init__(self, pool: PagePool, slots: Tensor) -> None:
        self._pool, self._slots = pool, slots
        if elementwise_kernels(pool.data) is not None:
            return
        page, head, _, which, slot = (stride // pool.data.shape[-1] for stride in pool.data.stride()[:5])
        heads = torch.arange(pool.data.shape[1]) * head + torch.arange(2)[:, None] * which
        first = slots // pool.page_size * page + slots % pool.page_size * slot
        self._rows = (first[:, None] + heads.view(-1)).view(-1)
        """Of layer 0, counted in heads of one token."""

    def write(self, layer: int, kv: Tensor) -> None:
        """See PagePool.write."""
        data = self._pool.data
        if (kernels := elementwise_kernels(data)) is not None:
            kernels.store_kv(data[:, :, layer], self._slots, kv)
            return
        heads = _words_of(data.view(-1, data.shape[-1]))[layer * data.stride(2) // data.shape[-1] :]
        heads.index_copy_(0, self._rows, _words_of(kv.reshape(len(self._rows), data.shape[-1])))


def _words_of(rows: Tensor) -> Tensor:
    """The same bytes in the largest words that make up a row, since a copy goes word by word."""
    num_bytes = rows.shape[1] * rows.itemsize
    word = next(word for word in (torch.int64, torch.int32, torch.int16, torch.int8) if num_bytes % word.itemsize == 0)
    return rows.view(word)
