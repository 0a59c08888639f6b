"""Storage of one rank's pages."""

import hmac
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

import msgspec
from blake3 import blake3

from cluster.spec.kv import PoolLayout
from cluster.spec.registry import RankRecord
from cluster.spec.tiers import StorageFigures, TierPage
from transfer.page_range import batches
from workers.hicache.storage.interface import Read, StorageBackend, StorageError, StorageObject

_log = logging.getLogger(__name__)

FORMAT_VERSION = 6
"""Version of page names, headers and byte order. Objects of other versions are not found."""
HEADER_BYTES = 32
"""Bytes of an object before the page: a code that authenticates the object."""
_LOOK_UP_PAGES = 128
"""Maximum number of pages per look-up. The deadline and shutdown are checked between look-ups."""
_BATCH_PAGES = 16
_BATCH_BYTES = 16 << 20
"""Maximum number of bytes in one read or write of several pages."""

Buffer = Callable[[TierPage], memoryview]
"""Function that returns a page's host memory."""


def object_bytes(layout: PoolLayout) -> int:
    """Return the maximum number of bytes of a stored page, with its header."""
    return HEADER_BYTES + layout.page_bytes


class PageStore:
    """Reader and writer of one rank's heads and layers of pages in storage, with one object per page.

    A page's bytes do not depend on CP, so replicas that divide heads and layers alike share objects. Page keys depend
    on the salt, so requests with different salts share nothing. Each call returns one flag per page and adds to
    ``failures``. No call to storage starts after ``until_s``, a ``time.monotonic`` time.
    """

    def __init__(self, backend: StorageBackend, record: RankRecord, weights: str) -> None:
        """Create a rank's store. ``weights`` is a digest of the model's weights."""
        geometry, layout = record.geometry, record.layout
        self._backend = backend
        self._batch = max(1, min(_BATCH_PAGES, _BATCH_BYTES // layout.page_bytes))
        # These fields must be equal for KV to be interchangeable. The served model name may differ.
        facts = (FORMAT_VERSION, weights, geometry.page_size, geometry.num_layers, geometry.groups)
        self._facts = msgspec.msgpack.encode(facts)
        heads = "_".join(f"h{group.heads.start}-{group.heads.stop - 1}" for group in layout.groups)
        self._shard = f"{heads}.l{layout.layers.start}-{layout.layers.stop - 1}"
        self._is_stopping = False

    def look_up(self, pages: Sequence[TierPage], until_s: float, failures: Counter[str]) -> list[bool]:
        """Look up pages. A page counts as stored only if all pages before it are stored."""
        done = list[bool]()
        while all(done) and len(done) < len(pages):
            batch = pages[len(done) : len(done) + _LOOK_UP_PAGES]
            done += self._try(self._present, batch, until_s, failures)
        num_found = [*done, False].index(False)
        return [number < num_found for number in range(len(pages))]

    def fetch(self, pages: Sequence[TierPage], buffer: Buffer, until_s: float, failures: Counter[str]) -> list[bool]:

        def fetch_batch(batch: Sequence[TierPage]) -> list[bool]:
            objects = [self._object(page, bytearray(HEADER_BYTES), buffer(page)) for page in batch]
            outcomes = self._backend.read(objects)
            return [self._accept(*each, failures) for each in zip(batch, objects, outcomes, strict=True)]

        return self._in_batches(fetch_batch, pages, until_s, failures)

    def store(self, pages: Sequence[TierPage], buffer: Buffer, until_s: float, failures: Counter[str]) -> list[bool]:
        """Write pages that are not stored yet."""

        def store_batch(batch: Sequence[TierPage]) -> list[bool]:
            is_stored = self._present(batch)
            missing = [page for page, is_there in zip(batch, is_stored, strict=True) if not is_there]
            objects = [self._object(page, self._header(page, buffer(page)), buffer(page)) for page in missing]
            errors = iter(self._backend.write(objects) if objects else ())
            return [is_there or _noted(next(errors), failures) for is_there in is_stored]

        return self._in_batches(store_batch, pages, until_s, failures)

    def figures(self) -> StorageFigures | None:
        return self._backend.figures()

    def stop(self) -> None:
        """Prevent further calls to storage. Safe to call from any thread."""
        self._is_stopping = True

    def close(self) -> None:
        self._backend.close()

    def _in_batches(
        self,
        use: Callable[[Sequence[TierPage]], list[bool]],
        pages: Sequence[TierPage],
        until_s: float,
        failures: Counter[str],
    ) -> list[bool]:
        return [
            is_done for batch in batches(pages, self._batch) for is_done in self._try(use, batch, until_s, failures)
        ]

    def _try(
        self,
        use: Callable[[Sequence[TierPage]], list[bool]],
        batch: Sequence[TierPage],
        until_s: float,
        failures: Counter[str],
    ) -> list[bool]:
        """Call ``use`` for a batch unless it is too late. A StorageError fails all pages of the batch."""
        if self._is_stopping or time.monotonic() >= until_s:
            failures["late"] += len(batch)
            return [False] * len(batch)
        try:
            return use(batch)
        except StorageError as error:
            return [_noted(error, failures) for _ in batch]

    @cached_property
    def _namespace(self) -> str:
        """Folder of the pages with this rank's facts. Raises ``StorageError`` until storage is open."""
        return self._keyed(self._facts, b"namespace")

    def _name(self, page: TierPage) -> str:
        return f"{self._namespace}/{self._keyed(page.key, b'page')}.{self._shard}"

    def _keyed(self, data: bytes, purpose: bytes) -> str:
        """Return a digest that reveals nothing without the storage's key. Page keys are digests of prompts."""
        return blake3(purpose + data, key=self._backend.key).hexdigest(length=16)

    def _header(self, page: TierPage, data: memoryview) -> bytes:
        """Return the code that authenticates the content and the name of a page's object."""
        return blake3(self._name(page).encode() + b"\0", key=self._backend.key).update(data).digest()

    def _present(self, pages: Sequence[TierPage]) -> list[bool]:
        depths = {self._name(page): page.depth for page in pages}
        there = set(self._backend.present(depths))
        return [name in there for name in depths]

    def _object(self, page: TierPage, header: bytes | bytearray, data: memoryview) -> StorageObject:
        return StorageObject(self._name(page), [memoryview(header), data], page.depth)

    def _accept(self, page: TierPage, item: StorageObject, outcome: Read, failures: Counter[str]) -> bool:
        """Return whether the requested page was read. Delete the object if it is corrupt."""
        if outcome is False or isinstance(outcome, StorageError):
            return outcome is not False and _noted(outcome, failures)
        header, data = item.parts
        if outcome is True and hmac.compare_digest(header, self._header(page, data)):
            return True
        reason = f"{item.name} does not match its header" if outcome is True else str(outcome)
        _log.warning("deleting a corrupt object: %s", reason)
        failures["corrupt"] += 1
        try:
            self._backend.delete(item.name)
        except StorageError as error:
            _noted(error, failures)
        return False


def _noted(error: StorageError | None, failures: Counter[str]) -> bool:
    """Log and count an error. Return True if there is none."""
    if error is not None:
        _log.warning("%s", error)
        failures["error"] += 1
    return error is None
