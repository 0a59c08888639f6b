"""Host memory in the shape of a GPU's pool, through which pages travel: peers read from and write to this.

A page has the same place in both. It goes out only after it was written, and comes in before anything reads it.
"""

from collections.abc import Sequence

import torch

from workers.cache.page_pool import PagePool


class Staging:
    """The pages of one pool and their like in host memory."""

    def __init__(self, pool: PagePool, host: memoryview) -> None:
        """``host`` has at least the bytes of the pool; of a pool on a GPU it is pinned."""
        self._pages = pool.data.flatten(3).view(torch.uint8)
        flat = torch.frombuffer(host, dtype=torch.uint8)
        self._host = flat[: self._pages.numel()].view(self._pages.shape)
        self._stream: torch.cuda.Stream | None = None
        if self._pages.is_cuda:
            self._stream = torch.cuda.Stream(self._pages.device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event | None:
        """On the computing thread: a moment after everything that was started so far."""
        return torch.cuda.current_stream(self._pages.device).record_event() if self._stream is not None else None

    def put_out(self, pages: Sequence[int], layers: slice, written: torch.cuda.Event | None) -> None:
        """On any one thread: copy layers of pages to the host once ``written`` has come; they are there on return."""
        if self._stream is None:
            self._copy(self._host, self._pages, pages, layers)
            return
        assert written is not None, "a GPU's pages without the moment in which they were written"
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(written)
            self._copy(self._host, self._pages, pages, layers)
        self._stream.synchronize()

    def take_in(self, pages: Sequence[int]) -> None:
        """On the computing thread: copy pages from the host, before what is started from now on."""
        self._copy(self._pages, self._host, pages, slice(None))

    @staticmethod
    def _copy(target: torch.Tensor, source: torch.Tensor, pages: Sequence[int], layers: slice) -> None:
        """Only what is one piece on both sides can the GPU copy by itself: a page, or some layers of a head."""
        is_whole = layers.indices(source.shape[2]) == (0, source.shape[2], 1)
        heads: Sequence[int | slice] = [slice(None)] if is_whole else range(source.shape[1])
        for page in pages:
            for head in heads:
                target[page, head, layers].copy_(source[page, head, layers], non_blocking=True)
