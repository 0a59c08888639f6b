"""Host memory in the shape of a GPU's pool, through which pages travel: peers read from and write to this.

A page has the same place in both. It goes out only after it was written, and comes in before anything reads it.
"""

from collections.abc import Sequence

import torch

from workers.cache.page_copies import PageCopies, copy_stream
from workers.cache.page_pool import PagePool
from workers.device import Moment, moment_on


class Staging:
    """The pages of one pool and their like in host memory."""

    def __init__(self, pool: PagePool, host: memoryview) -> None:
        """``host`` has at least the bytes of the pool; of a pool on a GPU it is pinned."""
        self._pages = pool.data.flatten(3).view(torch.uint8)
        flat = torch.frombuffer(host, dtype=torch.uint8)
        self._host = flat[: self._pages.numel()].view(self._pages.shape)
        self._stream = copy_stream(self._pages.device)

    def mark(self) -> Moment:
        """On the computing thread: a moment after everything that was started so far."""
        return moment_on(self._pages.device)

    def put_out(self, pages: Sequence[int], layers: slice, written: torch.cuda.Event | None) -> None:
        """On any one thread: copy layers of pages to the host once ``written`` has come; they are there on return."""
        copies = PageCopies(self._pages, pages, self._host, pages).layers(layers)
        if self._stream is None:
            copies.start()
            return
        assert written is not None, "a GPU's pages without the moment in which they were written"
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(written)
            copies.start()
        self._stream.synchronize()

    def take_in(self, pages: Sequence[int]) -> None:
        """On the computing thread: copy pages from the host, before what is started from now on."""
        PageCopies(self._host, pages, self._pages, pages).start()
