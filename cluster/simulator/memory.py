"""The page memory of every rank, and who may write to it: the rules that no message may break."""

from dataclasses import dataclass, field
from typing import Self

from cluster.simulator.scenario import PAGE_SIZE, VOCAB_SIZE
from cluster.spec.ids import Room
from cluster.spec.kv import PoolLayout
from cluster.spec.transfer_messages import Ticket
from workers.cache.page_allocator import PageAllocator


class Violation(AssertionError):  # noqa: N818
    """A promise is broken; the message says which."""


_NOTHING = VOCAB_SIZE
"""The byte where no token is."""


@dataclass(slots=True, eq=False)
class Memory:
    """One rank's pool. A page begins with the tokens written to it, one byte each; behind them is nothing."""

    session: str
    """Name of this pool; a restarted rank has another one."""
    allocator: PageAllocator
    """Of the rank's leader."""
    page_bytes: int
    pool: bytearray
    host: dict[int, bytes] = field(default_factory=dict)
    """Its pages in host memory."""
    is_gone: bool = False
    """Its process is dead."""

    @classmethod
    def empty(cls, session: str, allocator: PageAllocator, layout: PoolLayout) -> Self:
        """Nothing is in any page."""
        return cls(session, allocator, layout.page_bytes, bytearray([_NOTHING]) * layout.pool_bytes)

    def tokens(self, page: int) -> bytes:
        """What a page holds."""
        start = page * self.page_bytes
        return bytes(self.pool[start : start + PAGE_SIZE]).rstrip(bytes([_NOTHING]))

    def put(self, page: int, tokens: bytes) -> None:
        """Fill a page with these tokens."""
        self.copy_in(page, tokens.ljust(self.page_bytes, bytes([_NOTHING])))

    def write(self, page: int, place: int, token: int) -> None:
        """Store a token that was computed here."""
        self.put(page, self.tokens(page)[:place] + bytes([token]))

    def copy_out(self, page: int) -> bytes:
        """All bytes of a page."""
        return bytes(self.pool[page * self.page_bytes : (page + 1) * self.page_bytes])

    def copy_in(self, page: int, copy: bytes) -> None:
        """Bytes that came from another pool."""
        self.pool[page * self.page_bytes : (page + 1) * self.page_bytes] = copy


@dataclass(frozen=True, slots=True)
class _Permission:
    room: Room
    generation: int
    expected: bytes
    """What the page must hold in the end."""


class Tickets:
    """Every permission to write that was given, from the messages that give it."""

    def __init__(self) -> None:
        self._permissions: dict[str, dict[int, _Permission]] = {}
        """By pool, by page."""
        self._memories: dict[Room, Memory] = {}
        """The pool that a room's newest ticket is for."""

    def give(self, memory: Memory, ticket: Ticket, prompt: bytes) -> None:
        """Decode lets prefill write to the pages of a ticket."""
        self._memories[ticket.room] = memory
        permissions = self._permissions.setdefault(memory.session, {})
        for number, page in enumerate(ticket.pages[0], start=ticket.held_pages):
            if not memory.allocator.is_held(page):
                raise Violation(f"room {ticket.room}: page {page} of its ticket is not its own")
            expected = prompt[number * PAGE_SIZE : (number + 1) * PAGE_SIZE]
            permissions[page] = _Permission(ticket.room, ticket.generation, expected)

    def check_write(self, memory: Memory, page: int, room: Room, generation: int) -> None:
        """A byte of prefill arrives in a page."""
        permission = self._permissions.get(memory.session, {}).get(page)
        if permission is None or (permission.room, permission.generation) != (room, generation):
            raise Violation(f"room {room} writes into page {page} of {memory.session}, for which it has no ticket")
        if not memory.allocator.is_held(page):
            raise Violation(f"room {room} writes into page {page} of {memory.session}, which is free or shared")

    def check_start(self, room: Room) -> None:
        """Decode reads the pages of a room from now on: all of them must be there, and nobody may write any more."""
        memory = self._memories.pop(room, None)
        if memory is None:
            return
        permissions = self._permissions[memory.session]
        for page in [page for page, permission in permissions.items() if permission.room == room]:
            expected = permissions.pop(page).expected
            if not memory.tokens(page).startswith(expected):
                raise Violation(f"room {room} is read before page {page} of {memory.session} has arrived")
