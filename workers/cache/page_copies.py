"""Copies of pages within a GPU, or between it and pinned host memory: by its copy engine, or by a kernel."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workers.device import index_on
from workers.kernel_devices import has_kernels

LEAST_PIECE_BYTES = 448 << 10
"""Of what the copy engine is asked for. Estimated: 50 GB/s move as much in the 9 µs that the host takes to ask."""


@dataclass(frozen=True)
class PageCopies:
    """Pages ``of`` one memory ``[page, head, layer, ...]`` to be copied ``to`` places in another, each once."""

    source: Tensor
    of: Sequence[int]
    target: Tensor
    to: Sequence[int]

    def layers(self, layers: slice) -> "PageCopies":
        """Some layers of all."""
        return replace(self, source=self.source[:, :, layers], target=self.target[:, :, layers])

    def start(self) -> None:
        """Behind what the GPU's current stream was given before; between tensors of the CPU they are done on return.

        One piece after another is asked of the copy engine, which keeps nobody from computing, where pieces are large:
        whole pages, mostly. Smaller ones, as of some layers, are copied by one launch, as is all that stays on the GPU.
        """
        if not self.of or not self.source.numel():
            return
        if self._is_for_a_kernel(next(self._pieces())[0].nbytes):
            from workers.kernels.copy_pages import copy_pages

            device = self.source.device if self.source.is_cuda else self.target.device
            places = index_on([*self.of, *self.to], device).view(2, len(self.of))
            copy_pages(self.source, self.target, places)
            return
        for target, source in self._pieces():
            target.copy_(source, non_blocking=True)

    def _is_for_a_kernel(self, piece_bytes: int) -> bool:
        is_within = self.source.is_cuda and self.target.is_cuda
        return (has_kernels(self.source) or has_kernels(self.target)) and (is_within or piece_bytes < LEAST_PIECE_BYTES)

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """To and from: what is adjacent on both sides, since torch would wait for others. A page, or of it one head."""
        is_whole = self.source[0].is_contiguous() and self.target[0].is_contiguous()
        heads: Sequence[slice | int] = [slice(None)] if is_whole else range(self.source.shape[1])
        return (
            (self.target[to, head], self.source[of, head])
            for of, to in zip(self.of, self.to, strict=True)
            for head in heads
        )


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A GPU's stream for copies: their few programs need not wait until all programs of a large kernel have begun."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def warm_up_copies(pages: Tensor) -> None:
    """Compile what copies them: the last page ``[page, head, ...]``, which nobody reads, to its own place."""
    if has_kernels(pages):
        last = [len(pages) - 1]
        PageCopies(pages, last, pages, last).start()
