"""One rank's pages in storage: what is there, reading and writing. Blocks as long as the backend does."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from cluster.spec.registry import RankRow
from cluster.spec.tiers import StorageFigures, TierPage
from transfer.plan import copies_of
from workers.hicache.storage.batches import batches, note, results
from workers.hicache.storage.cuts import KnownCuts
from workers.hicache.storage.interface import StorageBackend, StorageError, StorageObject
from workers.hicache.storage.objects import Cut, Naming, digest_of
from workers.hicache.storage.page_reader import Buffer, PageReader, parts
from workers.hicache.storage.throttle import Throttle

_LOOK_PAGES = 128
"""Most pages that are looked for in one call, so that time and end are asked between."""


class PageStore:
    """Reads pages of every cut that it knows of, its own first, and writes those of its own.

    Methods give for each page whether it is there now, and count why others are not. Of ranks with the same heads one
    writes and all read.
    """

    def __init__(
        self,
        backend: StorageBackend,
        naming: Naming,
        row: RankRow,
        reads: Throttle,
        writes: Throttle,
    ) -> None:
        self._backend = backend
        self._naming = naming
        self._layout = row.layout
        self._writes_heads = row.coords.tp % copies_of(row) == 0
        """Of ranks with the same heads, the first one."""
        self._known = KnownCuts(backend, naming, Cut.of(row.ownership, row.sizes))
        self._reader = PageReader(backend, naming, row.layout, self._known)
        self._reads = reads
        self._writes = writes
        self._is_stopping = False

    def look_up(self, pages: Sequence[TierPage], until_s: float, failures: Counter[str]) -> list[bool]:
        """Which leading ones of these are there, under any cut."""
        num_found = 0
        try:
            while num_found < len(pages) and self._in_time(until_s, failures):
                failures["cut"] += self._known.look()
                num_more = self._count_longest(pages[num_found : num_found + _LOOK_PAGES], until_s)
                if not num_more:
                    break
                num_found += num_more
        except StorageError as error:
            note(error, failures)
        return [number < num_found for number in range(len(pages))]

    def fetch(self, pages: Sequence[TierPage], buffer: Buffer, until_s: float, failures: Counter[str]) -> list[bool]:
        """Read pages; those that would be begun after ``until_s`` (monotonic) are left out."""
        is_due = partial(self._takes_turn, self._reads, until_s, failures)
        return [
            is_done
            for batch in batches(pages, self._layout.page_bytes)
            for is_done in self._reader.fetch(batch, buffer, is_due, failures)
        ]

    def store(self, pages: Sequence[TierPage], buffer: Buffer, until_s: float, failures: Counter[str]) -> list[bool]:
        """Write pages, as ``fetch`` reads them."""
        if not self._writes_heads:
            return [True] * len(pages)
        return [
            is_done
            for batch in batches(pages, self._layout.page_bytes)
            for is_done in self._store(batch, buffer, until_s, failures)
        ]

    def figures(self) -> StorageFigures | None:
        """Of the backend."""
        return self._backend.figures()

    def stop(self) -> None:
        """From any thread: begin no further page."""
        self._is_stopping = True

    def close(self) -> None:
        """Let go of the backend."""
        self._backend.close()

    def _count_longest(self, pages: Sequence[TierPage], until_s: float) -> int:
        """As many leading pages as the cut has that has most of them."""
        longest = 0
        for cut in self._known.cuts:
            if longest == len(pages) or not self._goes_on(until_s):
                break
            longest = max(longest, self._count_leading(cut, pages))
        return longest

    def _count_leading(self, cut: Cut, pages: Sequence[TierPage]) -> int:
        names = [self._names(cut, page) for page in pages]
        return self._backend.count_leading([name for of_page in names for name in of_page]) // len(names[0])

    def _store(
        self, pages: Sequence[TierPage], buffer: Buffer, until_s: float, failures: Counter[str]
    ) -> Iterator[bool]:
        """Those that are there, under any cut, are left as they are."""
        there = set[bytes]()
        try:
            if self._goes_on(until_s):
                there = self._find(pages, failures)
        except StorageError as error:
            note(error, failures, len(pages))
            yield from [False] * len(pages)
            return
        lacking = [page for page in pages if page.key not in there]
        outcomes = results(self._backend.write, [self._object(page, buffer(page)) for page in lacking])
        for page in pages:
            if page.key in there:
                yield True
                continue
            is_done = False
            if self._takes_turn(self._writes, until_s, failures):
                failed = next(outcomes)
                is_done = failed is None
                if failed is not None:
                    note(failed, failures)
            yield is_done

    def _find(self, pages: Sequence[TierPage], failures: Counter[str]) -> set[bytes]:
        """Keys of those that are there, where our own cut is told of from now on."""
        self._known.mark()
        failures["cut"] += self._known.look()
        there = set[bytes]()
        for cut in self._known.cuts:
            names = {page.key: self._names(cut, page) for page in pages if page.key not in there}
            depths = {name: page.depth for page in pages for name in names.get(page.key, ())}
            found = set(self._backend.present(depths))
            there |= {key for key, of_page in names.items() if found.issuperset(of_page)}
        return there

    def _object(self, page: TierPage, buffer: memoryview) -> StorageObject:
        (part,) = parts(self._naming, self._layout, self._known.cuts[0], page)
        header = self._naming.header(part, page.key, digest_of(buffer))
        return StorageObject(part.name, [memoryview(header), buffer], page.depth)

    def _names(self, cut: Cut, page: TierPage) -> list[str]:
        return [part.name for part in parts(self._naming, self._layout, cut, page)]

    def _takes_turn(self, throttle: Throttle, until_s: float, failures: Counter[str]) -> bool:
        """Waits for a page's turn; False, for it and all behind it, where that would not come in time."""
        is_in_time = self._goes_on(until_s) and throttle.wait(self._layout.page_bytes, until_s)
        failures["late"] += not is_in_time
        return is_in_time

    def _in_time(self, until_s: float, failures: Counter[str]) -> bool:
        is_in_time = self._goes_on(until_s)
        failures["late"] += not is_in_time
        return is_in_time

    def _goes_on(self, until_s: float) -> bool:
        return time.monotonic() < until_s and not self._is_stopping
