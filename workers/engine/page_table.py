"""Pages of one request on one rank, as an array that grows in place: no step copies earlier pages."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.spec.kv import NO_PAGE


class PageTable:
    """Pages in order of position."""

    def __init__(self) -> None:
        self._pages = np.empty(16, dtype=np.int64)
        self._len = 0

    def extend(self, pages: Sequence[int], null_page: int) -> None:
        """Add pages at the end; the null page stands for those that no token of this request will see."""
        end = self._len + len(pages)
        if end > len(self._pages):
            self._pages = np.concatenate([self._pages, np.empty(max(end, len(self._pages)), dtype=np.int64)])
        self._pages[self._len : end] = [null_page if page == NO_PAGE else page for page in pages]
        self._len = end

    @property
    def all(self) -> NDArray[np.int64]:
        """Return all pages so far; later additions do not change the result."""
        return self._pages[: self._len]
