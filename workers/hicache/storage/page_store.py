"""Pages of one rank in storage: look-up, reading and writing. Calls block as long as the backend does."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import TypeVar

from cluster.spec.tiers import StorageFigures, TierPage
from workers.hicache.storage.interface import Read, StorageBackend, StorageError, StorageObject
from workers.hicache.storage.objects import HEADER_BYTES, ObjectFormat

_log = logging.getLogger(__name__)

_LOOK_UP_PAGES = 128
"""Most pages looked up in one call, so that time and shutdown are checked in between."""
_BATCH_PAGES = 16
_BATCH_BYTES = 16 << 20
"""Most bytes read or written in one call, unless a single page has more."""

Buffer = Callable[[TierPage], memoryview]
"""Function that returns the memory that a page's bytes are read into or written from."""
Outcome = TypeVar("Outcome")


class PageStore:
    """Reader and writer of one rank's pages. Calls return, for each page, whether it is there, and count failures.

    No page is started after ``until_s``, a time of the monotonic clock.
    """

    def __init__(self, backend: StorageBackend, format_: ObjectFormat, page_bytes: int) -> None:
        self._backend = backend
        self._format = format_
        self._page_bytes = page_bytes
        self._is_stopping = False

    def look_up(self, pages: Sequence[TierPage], until_s: float, failures: Counter[str]) -> list[bool]:
        """Return which leading pages are stored."""
        num_found = 0
        try:
            while num_found < len(pages) and self._in_time(until_s, failures):
                names = [self._format.name(page) for page in pages[num_found : num_found + _LOOK_UP_PAGES]]
                num_leading = self._backend.count_leading(names)
                num_found += num_leading
                if num_leading < len(names):
                    break
        except StorageError as error:
            _note(error, failures)
        return [number < num_found for number in range(len(pages))]

    def fetch(self, pages: Sequence[TierPage], buffer: Buffer, until_s: float, failures: Counter[str]) -> list[bool]:
        """Read pages."""
        return [is_done for batch in self._batches(pages) for is_done in self._fetch(batch, buffer, until_s, failures)]

    def store(self, pages: Sequence[TierPage], buffer: Buffer, until_s: float, failures: Counter[str]) -> list[bool]:
        """Write pages that are not stored yet."""
        if not self._format.is_writer:
            return [True] * len(pages)
        return [is_done for batch in self._batches(pages) for is_done in self._store(batch, buffer, until_s, failures)]

    def figures(self) -> StorageFigures | None:
        return self._backend.figures()

    def stop(self) -> None:
        """Start no further page. Any thread may call this."""
        self._is_stopping = True

    def close(self) -> None:
        self._backend.close()

    def _batches(self, pages: Sequence[TierPage]) -> Iterator[Sequence[TierPage]]:
        size = max(1, min(_BATCH_PAGES, _BATCH_BYTES // self._page_bytes))
        return (pages[start : start + size] for start in range(0, len(pages), size))

    def _fetch(
        self, pages: Sequence[TierPage], buffer: Buffer, until_s: float, failures: Counter[str]
    ) -> Iterator[bool]:
        headers = [memoryview(bytearray(HEADER_BYTES)) for _ in pages]
        objects = [self._object(page, header, buffer(page)) for page, header in zip(pages, headers, strict=True)]
        outcomes = _outcomes(self._backend.read, objects)
        for page, item in zip(pages, objects, strict=True):
            may_read = self._in_time(until_s, failures)
            yield may_read and self._accept(page, item, next(outcomes), failures)

    def _accept(self, page: TierPage, item: StorageObject, outcome: Read, failures: Counter[str]) -> bool:
        """Return whether a page was read and is the one that was asked for; delete a corrupt object."""
        if outcome is False:
            return False
        if isinstance(outcome, StorageError):
            _note(outcome, failures)
            return False
        header, data = item.parts
        if outcome is True and self._format.matches(page, bytes(header), data):
            return True
        reason = f"{item.name} does not match its header" if outcome is True else str(outcome)
        _log.warning("deleting a corrupt object: %s", reason)
        failures["corrupt"] += 1
        try:
            self._backend.delete(item.name)
        except StorageError as error:
            _note(error, failures)
        return False

    def _store(
        self, pages: Sequence[TierPage], buffer: Buffer, until_s: float, failures: Counter[str]
    ) -> Iterator[bool]:
        stored = set[str]()
        try:
            if self._goes_on(until_s):
                stored.update(self._backend.present({self._format.name(page): page.depth for page in pages}))
        except StorageError as error:
            _note(error, failures, len(pages))
            yield from repeat(False, len(pages))
            return
        missing = [page for page in pages if self._format.name(page) not in stored]
        objects = [self._object(page, self._format.header(page, buffer(page)), buffer(page)) for page in missing]
        outcomes = _outcomes(self._backend.write, objects)
        for page in pages:
            if self._format.name(page) in stored:
                yield True
                continue
            is_done = False
            if self._in_time(until_s, failures):
                error_or_none = next(outcomes)
                is_done = error_or_none is None
                if error_or_none is not None:
                    _note(error_or_none, failures)
            yield is_done

    def _object(self, page: TierPage, header: bytes | memoryview, data: memoryview) -> StorageObject:
        return StorageObject(self._format.name(page), [memoryview(header), data], page.depth)

    def _in_time(self, until_s: float, failures: Counter[str]) -> bool:
        is_in_time = self._goes_on(until_s)
        failures["late"] += not is_in_time
        return is_in_time

    def _goes_on(self, until_s: float) -> bool:
        return time.monotonic() < until_s and not self._is_stopping


def _outcomes(
    use: Callable[[Sequence[StorageObject]], Iterator[Outcome]], objects: Sequence[StorageObject]
) -> Iterator[Outcome | StorageError]:
    """Yield the outcome of each object; an error of the whole call is the outcome of all that are left."""
    try:
        yield from use(objects)
    except StorageError as error:
        yield from repeat(error)


def _note(error: StorageError, failures: Counter[str], num_pages: int = 1) -> None:
    _log.warning("%s", error)
    failures["error"] += num_pages
