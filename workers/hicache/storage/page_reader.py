"""Pages out of stored objects, which are checked first."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cluster.spec.kv import PoolLayout
from cluster.spec.tiers import TierPage
from transfer.page_range import PageRange
from workers.hicache.storage.batches import note, results
from workers.hicache.storage.cuts import KnownCuts
from workers.hicache.storage.interface import Read, StorageBackend, StorageError, StorageObject
from workers.hicache.storage.objects import HEADER_BYTES, Cut, Naming, StoredPart, digest_of

_log = logging.getLogger(__name__)

Buffer = Callable[[TierPage], memoryview]
"""Where a page's bytes are, or are to go."""


class PageReader:
    """One rank's."""

    def __init__(self, backend: StorageBackend, naming: Naming, layout: PoolLayout, known: KnownCuts) -> None:
        self._backend = backend
        self._naming = naming
        self._layout = layout
        self._known = known

    def fetch(
        self, pages: Sequence[TierPage], buffer: Buffer, is_due: Callable[[], bool], failures: Counter[str]
    ) -> Iterator[bool]:
        """Whether each has been read; from the first one on for which ``is_due``, which may wait, says no, none is.

        Nearly all are of our own cut, and read in one call; what is not there is looked for page by page.
        """
        own, *others = self._known.cuts
        coming = [
            _Coming(part, page, buffer(page)) for page in pages for part in parts(self._naming, self._layout, own, page)
        ]
        outcomes = results(self._backend.read, [one.object for one in coming])
        for page, one in zip(pages, coming, strict=True):
            if not is_due():
                yield False
                continue
            try:
                is_done = self._check(one, next(outcomes), failures)
                is_done = is_done or any(self._join(cut, page, one.target, failures) for cut in others)
            except StorageError as error:
                note(error, failures)
                is_done = False
            yield is_done

    def _join(self, cut: Cut, page: TierPage, buffer: memoryview, failures: Counter[str]) -> bool:
        """Put a page together from the objects of one cut."""
        coming = [
            _Coming(part, page, memoryview(bytearray(part.layout.page_bytes)))
            for part in parts(self._naming, self._layout, cut, page)
        ]
        outcomes = results(self._backend.read, [one.object for one in coming])
        for one in coming:
            if not self._check(one, next(outcomes), failures):
                return False
            _scatter(one.part.layout, one.target, self._layout, buffer)
        return True

    def _check(self, one: "_Coming", outcome: Read, failures: Counter[str]) -> bool:
        """Whether the object that was wanted has come.

        Raises:
            StorageError: it could not be read.
        """
        if isinstance(outcome, StorageError):
            raise outcome
        if outcome is False:
            return False
        if outcome is True:
            if bytes(one.header) == self._naming.header(one.part, one.key, digest_of(one.target)):
                return True
            reason = f"{one.part.name} has other bytes than its header says, or another header"
        else:
            reason = str(outcome)
        _log.warning("%s; it is deleted", reason)
        failures["corrupt"] += 1
        self._backend.delete(one.part.name)
        return False


class _Coming:
    """An object on its way."""

    def __init__(self, part: StoredPart, page: TierPage, target: memoryview) -> None:
        self.part = part
        self.key = page.key
        self.header = memoryview(bytearray(HEADER_BYTES))
        self.target = target
        self.object = StorageObject(part.name, [self.header, target], page.depth)


def parts(naming: Naming, layout: PoolLayout, cut: Cut, page: TierPage) -> list[StoredPart]:
    """The objects of a cut that have something of a page's heads and layers here; a single one in our own cut."""
    return list(naming.parts(cut, page.key, page.place, layout))


def _scatter(source: PoolLayout, read: memoryview, target: PoolLayout, page: memoryview) -> None:
    theirs, ours = np.frombuffer(read, dtype=np.uint8), np.frombuffer(page, dtype=np.uint8)
    for source_offset, target_offset, num_bytes in PageRange(source, [0]).spans_to(PageRange(target, [0])):
        np.copyto(ours[target_offset : target_offset + num_bytes], theirs[source_offset : source_offset + num_bytes])
