"""Requests that a rank knows, and their page tables."""

from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from cluster.spec.kv import NO_PAGE
from cluster.spec.sampling import TokenLogprobs
from cluster.spec.step_messages import NewRequest


class PageTable:
    """Pages of one request in order of position. The array grows in place, so that steps do not copy earlier pages."""

    def __init__(self) -> None:
        self._pages = np.empty(16, dtype=np.int64)
        self._len = 0

    def extend(self, pages: Sequence[int], null_page: int) -> None:
        """Append pages. The null page replaces pages that no token of this request will see."""
        end = self._len + len(pages)
        if end > len(self._pages):
            self._pages = np.concatenate([self._pages, np.empty(max(end, len(self._pages)), dtype=np.int64)])
        self._pages[self._len : end] = [null_page if page == NO_PAGE else page for page in pages]
        self._len = end

    @property
    def all(self) -> NDArray[np.int64]:
        """Return all pages so far. Later calls to ``extend`` do not change the result."""
        return self._pages[: self._len]


class KnownRequest(NewRequest, frozen=True, kw_only=True):
    """Request introduced by a NewRequest, with the state that a rank adds."""

    tables: list[PageTable]
    """Page tables by lifetime. In a sharded pool, page p is page p // cp of CP rank p % cp."""
    prompt_logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)
    """Prompt log-probabilities computed so far, until they are reported with the first sampled token."""

    @classmethod
    def of(cls, request: NewRequest, num_lifetimes: int) -> "KnownRequest":
        return cls(**structs.asdict(request), tables=[PageTable() for _ in range(num_lifetimes)])

    @property
    def pages(self) -> list[list[int]]:
        """Return a copy of the tables, for senders."""
        return [table.all.tolist() for table in self.tables]
