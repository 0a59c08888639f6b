"""Page copies within a device, or between a GPU and pinned host memory."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cluster.spec.kv import PoolLayout
from transfer.page_range import PageRange
from workers.device import Event, Stream, device_between, device_of, is_within_device

LEAST_PIECE_BYTES = 448 << 10
"""Minimum piece size for the copy engine. A kernel copies smaller pieces. This is an estimate: at 50 GB/s, copying such
a piece takes 9 µs, as long as the host takes to issue one copy.
"""


class PinnedMemory:
    """Pinned buffers. Call ``close`` before they are freed, since the GPU driver remembers their addresses."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        """Pin buffers. A buffer may be pinned only once per process.

        Raises:
            RuntimeError: the system does not allow that much pinned memory.
        """
        self._addresses: list[int] = []
        for buffer in buffers:
            address = int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, buffer.nbytes, 0)))
            self._addresses.append(address)

    def close(self) -> None:
        """Wait for running copies and unpin the buffers. Safe to call twice."""
        if not self._addresses:
            return
        torch.cuda.synchronize()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        while self._addresses:
            torch.cuda.check_error(int(runtime.cudaHostUnregister(self._addresses.pop())))


class Pages(NamedTuple):
    """Pages of a memory, in full or restricted to some layers."""

    memory: Tensor
    """``[page, byte]`` uint8."""
    range: PageRange


class PageMemory:
    """Memory divided into pages: a device pool, a host tier, or a region that peers write to."""

    def __init__(self, memory: Tensor, layout: PoolLayout) -> None:
        """Wrap flat uint8 memory. Bytes after the last complete page are unused."""
        assert memory.dtype == torch.uint8, f"got dtype {memory.dtype}, expected uint8"
        assert memory.ndim == 1, f"got shape {memory.shape}, expected a flat tensor"
        num_pages = len(memory) // layout.page_bytes
        self.device = device_of(memory)
        self.layout = layout
        self.bytes = memory[: num_pages * layout.page_bytes].view(num_pages, layout.page_bytes)
        """``[page, byte]``."""

    def at(self, pages: Sequence[int], layers: range | None = None, lifetime: int = 0) -> Pages:
        """Return pages by index, in full or restricted to some layers of one lifetime's groups."""
        return Pages(self.bytes, PageRange(self.layout, pages, layers, lifetime=lifetime))


def copy(source: Pages, target: Pages, after: Event | None = None, stream: Stream | None = None) -> Event | None:
    """Copy pages to the same number of pages in a memory of the same layout. Target pages must be distinct.

    On a CPU, the copy is complete on return. On a GPU, it runs after ``after`` on ``stream``, by default the current
    stream, and the returned event completes with it.

    Large pieces, usually full pages, use the copy engine, which does not delay kernels. Small pieces, and all copies
    within a GPU, use one kernel launch.
    """
    device = device_between(source.memory, target.memory)
    with device.on_stream(stream, after):
        if source.range.pages:
            views = (pages.range.views(pages.memory) for pages in (source, target))
            for source_view, target_view in zip(*views, strict=True):
                _copy_view(source_view, source.range.pages, target_view, target.range.pages)
        return device.record_event()


def warm_up_copies(memory: PageMemory) -> None:
    """Compile the copy kernel by copying the null page onto itself."""
    null = memory.at([len(memory.bytes) - 1])
    copy(null, null)


def _copy_view(source: Tensor, source_pages: Sequence[int], target: Tensor, target_pages: Sequence[int]) -> None:
    if _is_for_a_kernel(source, target):
        from workers.kernels.copy_pages import copy_pages

        indices = device_between(source, target).put_index([*source_pages, *target_pages]).view(2, len(source_pages))
        copy_pages(source, target, indices)
        return
    for target_piece, source_piece in _pieces(source, source_pages, target, target_pages):
        target_piece.copy_(source_piece, non_blocking=True)


def _is_for_a_kernel(source: Tensor, target: Tensor) -> bool:
    piece_bytes = source[0].nbytes if _is_adjacent(source) else source[0, 0].nbytes
    is_in_one_launch = is_within_device(source, target) or piece_bytes < LEAST_PIECE_BYTES
    return device_between(source, target).has_kernels and is_in_one_launch


def _pieces(
    source: Tensor, source_pages: Sequence[int], target: Tensor, target_pages: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (target, source) pairs that are contiguous on both sides, since torch makes other copies synchronous."""
    heads: Sequence[slice | int] = [slice(None)] if _is_adjacent(source) else range(source.shape[1])
    return (
        (target[target_page, head], source[source_page, head])
        for source_page, target_page in zip(source_pages, target_pages, strict=True)
        for head in heads
    )


def _is_adjacent(pages: Tensor) -> bool:
    return pages[0].is_contiguous()
