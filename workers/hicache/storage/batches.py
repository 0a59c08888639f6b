"""Pages in pieces that one call to a backend is about, and what came of each."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import TypeVar

from cluster.spec.tiers import TierPage
from workers.hicache.storage.interface import StorageError, StorageObject

_log = logging.getLogger(__name__)

_BATCH_PAGES = 16
_BATCH_BYTES = 16 << 20
"""Most of one call, unless a single page has more; so much may pass at once where there is a rate."""

Result = TypeVar("Result")


def batches(pages: Sequence[TierPage], page_bytes: int) -> Iterator[Sequence[TierPage]]:
    """All pages, in their order."""
    size = max(1, min(_BATCH_PAGES, _BATCH_BYTES // page_bytes))
    return (pages[start : start + size] for start in range(0, len(pages), size))


def results(
    use: Callable[[Sequence[StorageObject]], Iterator[Result]], objects: Sequence[StorageObject]
) -> Iterator[Result | StorageError]:
    """What comes of each object; what fails them all is what came of each of the rest."""
    try:
        yield from use(objects)
    except StorageError as error:
        yield from repeat(error)


def note(error: StorageError, failures: Counter[str], num_pages: int = 1) -> None:
    """Count pages that failed so."""
    _log.warning("%s", error)
    failures["error"] += num_pages
