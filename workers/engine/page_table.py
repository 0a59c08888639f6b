"""Pages of one request on one rank, as an array that grows in place: no step copies earlier pages."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class PageTable:
    """Pages in order of position."""

    def __init__(self) -> None:
        self._pages = np.empty(16, dtype=np.int64)
        self._len = 0

    def extend(self, pages: Sequence[int]) -> None:
        """Add pages at the end."""
        end = self._len + len(pages)
        if end > len(self._pages):
            self._pages = np.concatenate([self._pages, np.empty(max(end, len(self._pages)), dtype=np.int64)])
        self._pages[self._len : end] = pages
        self._len = end

    @property
    def all(self) -> NDArray[np.int64]:
        """Return all pages so far; later additions do not change the result."""
        return self._pages[: self._len]
