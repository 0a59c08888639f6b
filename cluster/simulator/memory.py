"""The page memory of every rank, and who may write to it: the rules that no message may break."""

from dataclasses import dataclass, field

from cluster.simulator.scenario import PAGE_SIZE
from cluster.spec.ids import Room
from cluster.spec.messages import Output
from cluster.spec.transfer_messages import Ticket
from workers.cache.page_allocator import PageAllocator


class Violation(AssertionError):  # noqa: N818
    """A promise is broken; the message says which."""


@dataclass(slots=True, eq=False)
class Memory:
    """One rank's pool. A page is the tokens written to it, one byte each."""

    session: str
    """Name of this pool; a restarted rank has another one."""
    allocator: PageAllocator
    """Of the rank's leader."""
    pages: list[bytes] = field(default_factory=list)
    host: dict[int, bytes] = field(default_factory=dict)
    """Its pages in host memory."""
    is_gone: bool = False
    """Its process is dead."""

    def write(self, page: int, place: int, token: int) -> None:
        """Store a token that was computed here."""
        self.pages[page] = self.pages[page][:place] + bytes([token])


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

    def give(self, memory: Memory, ticket: Ticket, prompt: bytes) -> None:
        """Decode lets prefill write to the pages of a ticket."""
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

    def check_start(self, memory: Memory, output: Output) -> None:
        """Decode reads the pages of a room from now on: all of them must be there, and nobody may write any more."""
        permissions = self._permissions.get(memory.session, {})
        for page in [page for page, permission in permissions.items() if permission.room == output.room]:
            expected = permissions.pop(page).expected
            if not memory.pages[page].startswith(expected):
                raise Violation(f"room {output.room} is read before page {page} of {memory.session} has arrived")
