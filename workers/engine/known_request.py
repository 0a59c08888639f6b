"""State of a request that every rank of a replica keeps between steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cluster.spec.kv import NO_PAGE
from cluster.spec.sampling import TokenLogprobs
from cluster.spec.step_messages import Admit
from workers.engine.sampling_state import SamplingState


class PageTable:
    """Pages of one request in order of position, as an array that grows in place: no step copies earlier pages."""

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


@dataclass(slots=True)
class KnownRequest:
    """State of a request as announced by step plans."""

    admit: Admit
    tables: list[PageTable]
    """Page tables by lifetime; page p of a sharded pool is page p // cp of CP rank p mod cp."""
    sampling: SamplingState | None = None
    """Sampling state on the sampling rank, from the first sample on."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the prompt so far, until the first sample."""

    @property
    def pages(self) -> list[list[int]]:
        """Return a copy of the tables, for senders."""
        return [table.all.tolist() for table in self.tables]
