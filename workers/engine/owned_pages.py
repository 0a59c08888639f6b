"""Pages of requests that one of several owners holds, and the positions of the tokens in them. Pure."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class OwnedPages(NamedTuple):
    """Pages of each request that one of ``owners`` ranks holds: page j of a request if j % owners equals its first."""

    owners: int
    firsts: tuple[int, ...]
    """First page by request."""
    page_size: int

    def num_held(self, request: int, num_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of a request's first tokens are in these pages."""
        full, rest = np.divmod(num_tokens, self.page_size)
        behind = full - self.firsts[request]
        is_partly_held = (behind >= 0) & (behind % self.owners == 0)
        held: NDArray[np.int64] = np.maximum(-(-behind // self.owners), 0) * self.page_size + is_partly_held * rest
        return held

    def positions(self, first: int | Tensor, numbers: Tensor) -> Tensor:
        """Return the positions of held tokens, numbered in order of position, given their request's first page."""
        pages, slots = numbers // self.page_size, numbers % self.page_size
        return (pages * self.owners + first) * self.page_size + slots
