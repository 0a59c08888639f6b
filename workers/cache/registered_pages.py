"""A GPU's pages that peers read and write where they are: no copy, only the moments that count."""

from collections.abc import Sequence

import torch

from workers.cache.page_pool import PagePool
from workers.device import Moment, moment_on


class RegisteredPages:
    """In the place of Staging. What has arrived is there before the plan that says so, and nobody reads it earlier."""

    def __init__(self, pool: PagePool) -> None:
        self._device = pool.data.device

    def mark(self) -> Moment:
        """On the computing thread: a moment after everything that was started so far."""
        return moment_on(self._device)

    def put_out(
        self,
        pages: Sequence[int],  # noqa: ARG002 - they stay where they are
        layers: slice,  # noqa: ARG002 - as the pages
        written: torch.cuda.Event | None,
    ) -> None:
        """On any one thread: returns when ``written`` has come, from which on the pages may be sent."""
        if written is not None:
            written.synchronize()

    def take_in(self, pages: Sequence[int]) -> None:
        """They are there."""
