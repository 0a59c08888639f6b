"""Page memory of each rank, the KV that its pages should have, and the permissions to write to them.

A KV byte depends on all tokens up to its own, on the head, on the layer, and on whether it is K or V. A stale, torn,
incomplete or misplaced page is therefore wrong in each of its heads and layers.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from cluster.simulator.scenario import PAGE_SIZE, VOCAB_SIZE
from cluster.spec.ids import Room
from cluster.spec.kv import FULL_ATTENTION, NO_PAGE, SLIDING_ATTENTION, GroupLayout, PoolLayout
from cluster.spec.registry import RankRecord
from cluster.spec.transfer_messages import Ticket
from transfer.page_range import PageRange, Span
from workers.cache.page_allocator import PageAllocator

TORN = 255
_MAX_LAYERS = 8


class Violation(AssertionError):  # noqa: N818
    """Broken promise."""


_NOTHING = VOCAB_SIZE
"""Byte of an empty slot."""
_TABLES = [
    bytes((seed + salt) % _NOTHING for seed in range(_NOTHING)) + bytes(range(_NOTHING, 256)) for salt in range(128)
]
"""Tables that map a token's seed to its KV byte, for each head, layer, and K or V."""

Pieces = Sequence[tuple[int, int]]
"""Byte ranges in a page, as start and end."""


class Text:
    """Tokens of one request so far, and their KV."""

    def __init__(self, prompt: bytes) -> None:
        self._tokens = bytearray()
        self._seeds = bytearray()
        """One byte per token, which depends on this token and all preceding ones."""
        self._digest = 0
        self._images: dict[tuple[int, int, int, tuple[GroupLayout, ...]], bytes] = {}
        self.put(0, prompt)

    def put(self, first: int, tokens: bytes) -> None:
        """Add the tokens that a rank computes, starting at position ``first``. All ranks must compute the same ones."""
        num_known = len(self._tokens) - first
        if num_known < 0 or not tokens.startswith(bytes(self._tokens[first : first + len(tokens)])):
            raise Violation(f"wrong tokens: {list(tokens)} are computed after {list(self._tokens[:first])}")
        for token in tokens[num_known:]:
            self._tokens.append(token)
            self._digest = zlib.crc32(bytes([token]), self._digest)
            self._seeds.append(self._digest % _NOTHING)

    def tokens(self, length: int) -> bytes:
        return bytes(self._tokens[:length])

    def page(self, number: int, length: int, layout: PoolLayout, lifetime: int) -> bytes:
        """Return the content of a lifetime's page when it holds the first ``length`` tokens."""
        end = min(length, (number + 1) * PAGE_SIZE)
        image = self._images.get((number, end, lifetime, layout.groups))
        if image is None:
            seeds = bytes(self._seeds[number * PAGE_SIZE : end]).ljust(PAGE_SIZE, bytes([_NOTHING]))
            image = b"".join(
                bytes(byte for byte in seeds.translate(table) for _ in range(dim))
                for group in layout.groups
                if group.lifetime == lifetime
                for table, dim in _tables(group)
            )
            self._images[number, end, lifetime, layout.groups] = image
        return image


@dataclass(slots=True, eq=False)
class Memory:
    """Device pool and host pool of one rank."""

    record: RankRecord
    allocator: PageAllocator
    """Allocator of the DP rank's leader."""
    pool: bytearray
    host: bytearray
    filled: set[int] = field(default_factory=set)
    is_gone: bool = False

    @classmethod
    def empty(cls, record: RankRecord, allocator: PageAllocator) -> Self:
        host_bytes = record.host_endpoint.num_bytes if record.host_endpoint is not None else 0
        return cls(record, allocator, bytearray([_NOTHING]) * record.layout.pool_bytes, bytearray([TORN]) * host_bytes)

    @property
    def session(self) -> str:
        """Return the name of this pool. A restarted rank has a new one."""
        return self.record.endpoint.session

    def page(self, page: int) -> bytes:
        size = self.record.layout.page_bytes
        return bytes(self.pool[page * size : (page + 1) * size])

    def put(self, page: int, image: bytes) -> None:
        start = page * self.record.layout.page_bytes
        self.pool[start : start + len(image)] = image

    def holds(self, page: int, image: bytes, pieces: Pieces) -> bool:
        """Return whether the given pieces of a page equal those of an image."""
        start = page * self.record.layout.page_bytes
        return all(self.pool[start + first : start + last] == image[first:last] for first, last in pieces)

    def put_pieces(self, page: int, image: bytes, pieces: Pieces) -> None:
        start = page * self.record.layout.page_bytes
        for first, last in pieces:
            self.pool[start + first : start + last] = image[first:last]

    def host_page(self, page: int) -> memoryview:
        size = self.record.layout.page_bytes
        return memoryview(self.host)[page * size : (page + 1) * size]

    def filled_host_page(self, page: int) -> memoryview:
        """Return a page of the host pool, which must have been written."""
        if page not in self.filled:
            raise Violation(f"host page {page} of {self.session} is read before it is filled")
        return self.host_page(page)

    def pieces(self, layers: range, lifetime: int) -> Pieces:
        """Return the pieces of a lifetime's page for the given layers, counted from the rank's first layer."""
        layout = self.record.layout
        page = PageRange(layout, [0], layout.layers[layers.start : layers.stop], lifetime=lifetime)
        return [(span.source_offset, span.source_offset + span.num_bytes) for span in page.spans_to(page)]


def _tables(group: GroupLayout) -> Iterator[tuple[bytes, int]]:
    """Yield the table and the bytes per token of each head, layer and part, in page order."""
    first = len(_TABLES) // 2 * (group.name not in (FULL_ATTENTION, SLIDING_ATTENTION))
    for head in group.heads:
        for layer in group.layers:
            for index, part in enumerate(group.parts):
                yield _TABLES[first + 2 * (head * _MAX_LAYERS + layer) + index], part.slot_bytes


def copy_spans(source: bytes | bytearray, target: bytearray, spans: Sequence[Span]) -> None:
    for from_offset, to_offset, num_bytes in spans:
        target[to_offset : to_offset + num_bytes] = source[from_offset : from_offset + num_bytes]


@dataclass(frozen=True, slots=True)
class _Permission:
    room: Room
    lifetime: int
    number: int


@dataclass(frozen=True, slots=True)
class _Transfer:
    memories: Sequence[Memory]
    text: Text
    num_tokens: int


class Tickets:
    """Write permissions that tickets grant."""

    def __init__(self) -> None:
        self._permissions: dict[PageAllocator, dict[int, _Permission]] = {}
        """Permissions by page, for each DP rank's allocator."""
        self._transfers: dict[Room, _Transfer] = {}
        """Transfer of the latest ticket, by room."""

    def grant(self, memories: Sequence[Memory], ticket: Ticket, text: Text, num_tokens: int) -> None:
        self._transfers[ticket.room] = _Transfer(memories, text, num_tokens)
        allocator = memories[0].allocator
        permissions = self._permissions.setdefault(allocator, {})
        for lifetime, pages in enumerate(ticket.pages):
            for number, page in enumerate(pages, start=ticket.num_held_pages):
                if page == NO_PAGE:
                    continue
                if not allocator.is_held(page):
                    raise Violation(f"room {ticket.room}: its ticket has page {page}, which it does not hold")
                permissions[page] = _Permission(ticket.room, lifetime, number)

    def check_write(self, memory: Memory, page: int, room: Room) -> None:
        """Check that prefill may write to a page."""
        permission = self._permissions.get(memory.allocator, {}).get(page)
        if permission is None or permission.room != room:
            raise Violation(f"room {room} writes into page {page} of {memory.session}, for which it has no ticket")
        if not memory.allocator.is_held(page):
            raise Violation(f"room {room} writes into page {page} of {memory.session}, which is free or shared")
        if not _is_sent_to(memory.record, page):
            raise Violation(f"room {room} writes into page {page} of {memory.session}, which gets it from another rank")

    def end(self, memory: Memory, page: int) -> None:
        """Revoke the permission for a page once its own replica writes to it."""
        permissions = self._permissions.get(memory.allocator)
        if permissions:
            permissions.pop(page, None)

    def check_start(self, room: Room) -> None:
        """Check that all pages of a room have arrived before decode reads them, and revoke their permissions."""
        transfer = self._transfers.pop(room, None)
        if transfer is None:
            return
        permissions = self._permissions[transfer.memories[0].allocator]
        for page in [page for page, permission in permissions.items() if permission.room == room]:
            permission = permissions.pop(page)
            for memory in transfer.memories:
                layout = memory.record.layout
                expected = transfer.text.page(permission.number, transfer.num_tokens, layout, permission.lifetime)
                if _is_sent_to(memory.record, page) and not memory.page(page).startswith(expected):
                    raise Violation(f"room {room}: page {page} of {memory.session} is read before it has arrived")


def num_head_copies(record: RankRecord) -> int:
    """Return the number of adjacent TP ranks that hold the same heads."""
    return math.gcd(*(max(1, record.sizes.tp // group.num_heads) for group in record.geometry.groups))


def _is_sent_to(record: RankRecord, page: int) -> bool:
    """Return whether prefill sends a page to this decode rank and not to another one with the same heads."""
    return (record.coords.tp - page) % num_head_copies(record) == 0
