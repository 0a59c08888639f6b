"""One rank's pages in storage: what is there, reading and writing. Blocks as long as the backend does."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from cluster.spec.kv import PoolLayout
from cluster.spec.ranks import head_copies
from cluster.spec.registry import RankRow
from cluster.spec.tiers import StorageFigures, TierPage
from transfer.layout import heads, layers
from transfer.plan import make_spans
from workers.hicache.storage.cuts import KnownCuts
from workers.hicache.storage.interface import CorruptObjectError, StorageBackend, StorageError
from workers.hicache.storage.objects import HEADER_BYTES, Cut, Naming, StoredPart, digest_of
from workers.hicache.storage.throttle import Throttle

_log = logging.getLogger(__name__)

Buffer = Callable[[TierPage], memoryview]
"""Where a page's bytes are, or are to go."""
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
        self._writes_heads = row.coords.tp % head_copies(row.geometry.num_kv_heads, row.sizes.tp) == 0
        """Of ranks with the same heads, the first one."""
        self._known = KnownCuts(backend, naming, Cut.of(row.ownership, row.sizes))
        self._reads = reads
        self._writes = writes
        self._is_stopping = False
        self._scratch: dict[int, bytearray] = {}

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
            _note(error, failures)
        return [number < num_found for number in range(len(pages))]

    def fetch(self, pages: Sequence[TierPage], buffer: Buffer, until_s: float, failures: Counter[str]) -> list[bool]:
        """Read pages; those that would be begun after ``until_s`` (monotonic) are left out."""
        return [self._in_time(until_s, failures) and self._fetch(page, buffer(page), failures) for page in pages]

    def store(self, pages: Sequence[TierPage], buffer: Buffer, until_s: float, failures: Counter[str]) -> list[bool]:
        """Write pages, as ``fetch`` reads them."""
        return [self._in_time(until_s, failures) and self._store(page, buffer(page), failures) for page in pages]

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
        parts = [list(self._parts(cut, page)) for page in pages]
        names = [part.name for of_page in parts for part in of_page]
        return self._backend.count_leading(names) // len(parts[0])

    def _fetch(self, page: TierPage, buffer: memoryview, failures: Counter[str]) -> bool:
        self._reads.wait(len(buffer))
        try:
            return any(self._read(cut, page, buffer, failures) for cut in self._known.cuts)
        except StorageError as error:
            _note(error, failures)
            return False

    def _read(self, cut: Cut, page: TierPage, buffer: memoryview, failures: Counter[str]) -> bool:
        """Put a page together from the objects of one cut."""
        for part in self._parts(cut, page):
            is_whole = _same_place(part.layout, self._layout)
            target = buffer if is_whole else memoryview(self._scratch_of(part.layout.page_bytes))
            if not self._read_part(part, page.key, target, failures):
                return False
            if not is_whole:
                _scatter(part.layout, target, self._layout, buffer)
        return True

    def _read_part(self, part: StoredPart, key: bytes, target: memoryview, failures: Counter[str]) -> bool:
        header = bytearray(HEADER_BYTES)
        try:
            if not self._backend.read(part.name, [memoryview(header), target]):
                return False
            if bytes(header) == self._naming.header(part, key, digest_of(target)):
                return True
            reason = f"{part.name} has other bytes than its header says, or another header"
        except CorruptObjectError as error:
            reason = str(error)
        _log.warning("%s; it is deleted", reason)
        failures["corrupt"] += 1
        self._backend.delete(part.name)
        return False

    def _store(self, page: TierPage, buffer: memoryview, failures: Counter[str]) -> bool:
        if not self._writes_heads:
            return True
        (part,) = self._parts(self._known.cuts[0], page)
        try:
            self._known.mark()
            failures["cut"] += self._known.look()
            if any(self._count_leading(cut, [page]) for cut in self._known.cuts):
                return True
            self._writes.wait(len(buffer))
            header = self._naming.header(part, page.key, digest_of(buffer))
            self._backend.write(part.name, [memoryview(header), buffer])
        except StorageError as error:
            _note(error, failures)
            return False
        return True

    def _parts(self, cut: Cut, page: TierPage) -> Sequence[StoredPart]:
        return list(self._naming.parts(cut, page.key, page.place, heads(self._layout), layers(self._layout)))

    def _in_time(self, until_s: float, failures: Counter[str]) -> bool:
        is_in_time = self._goes_on(until_s)
        failures["late"] += not is_in_time
        return is_in_time

    def _goes_on(self, until_s: float) -> bool:
        return time.monotonic() < until_s and not self._is_stopping

    def _scratch_of(self, num_bytes: int) -> bytearray:
        return self._scratch.setdefault(num_bytes, bytearray(num_bytes))


def _scatter(source: PoolLayout, read: memoryview, target: PoolLayout, page: memoryview) -> None:
    theirs, ours = np.frombuffer(read, dtype=np.uint8), np.frombuffer(page, dtype=np.uint8)
    for source_offset, target_offset, num_bytes in make_spans(source, target, [(0, 0)]):
        np.copyto(ours[target_offset : target_offset + num_bytes], theirs[source_offset : source_offset + num_bytes])


def _same_place(one: PoolLayout, other: PoolLayout) -> bool:
    return (heads(one), layers(one)) == (heads(other), layers(other))


def _note(error: StorageError, failures: Counter[str]) -> None:
    _log.warning("%s", error)
    failures["error"] += 1
