"""Decode requests without pages: in which order they get them, and what of them is here already. Sans I/O."""

from collections.abc import Iterator

from cluster.spec.ids import Room
from cluster.spec.kv import pages_for
from workers.cache.page_allocator import PageAllocator
from workers.scheduler.decode_request import DecodeRequest
from workers.scheduler.steps import StepScheduler
from workers.scheduler.waiting import Waiting


class DecodeQueue:
    """By priority, while there are pages. Further choices of a prompt wait until the one that brings it has it."""

    def __init__(self, allocator: PageAllocator, steps: StepScheduler, page_size: int) -> None:
        self._allocator = allocator
        self._steps = steps
        self._page_size = page_size
        self._queue = Waiting[DecodeRequest]()
        self._choices: dict[Room, list[DecodeRequest]] = {}
        """By the room that they wait for."""

    def __len__(self) -> int:
        return len(self._queue) + sum(map(len, self._choices.values()))

    def add(self, request: DecodeRequest) -> None:
        """Take one in."""
        self._queue.add(request)

    def add_choice(self, request: DecodeRequest, awaited: Room) -> None:
        """Take one in that waits for a room; it has no turn before ``end_wait``."""
        self._choices.setdefault(awaited, []).append(request)

    def end_wait(self, awaited: Room) -> list[DecodeRequest]:
        """Those that waited for a room; they are not here any more."""
        return self._choices.pop(awaited, [])

    def late_choices(self, now_s: float) -> list[DecodeRequest]:
        """Those that have waited for a room too long; they are still here."""
        return [request for waiting in self._choices.values() for request in waiting if request.give_up_s <= now_s]

    def remove(self, request: DecodeRequest) -> None:
        """Forget one, if it waits."""
        self._queue.remove(request.room)
        awaited = request.submit.prompt_of
        if awaited is not None and request in self._choices.get(awaited, []):
            self._choices[awaited].remove(request)
            if not self._choices[awaited]:
                del self._choices[awaited]

    def grant(self) -> Iterator[DecodeRequest]:
        """Give pages to those that can have them now; a retracted sequence goes before them all.

        Where one does not fit the next may, as far as the oldest one is not put off for ever.
        """
        if self._steps.num_waiting:
            return
        for request in self._queue.candidates():
            num_passing, oldest = self._count_passing(request), self._oldest()
            if not self._queue.may_pass(num_passing, self._new_pages_for(oldest)):
                continue
            held = self._shared_pages(request) or self._allocator.find(request.page_keys)
            needed = self._pages_for(request)
            if self._allocator.can_allocate(needed, held):
                self._queue.note_passed(num_passing)
                self._queue.remove(request.room)
                request.pages = self._allocator.allocate(needed, held)
                request.num_held = len(held)
                yield request

    def _count_passing(self, request: DecodeRequest) -> int:
        """Pages that the oldest queued request might have to wait for if this one took them: none if both fit."""
        needed, oldest = self._new_pages_for(request), self._oldest()
        fit = needed + self._new_pages_for(oldest) <= self._allocator.num_free
        return 0 if request is oldest or fit else needed

    def _oldest(self) -> DecodeRequest:
        assert self._queue.oldest is not None
        return self._queue.oldest

    def _pages_for(self, request: DecodeRequest) -> int:
        return pages_for(len(request.submit.prompt_ids), self._page_size)

    def _new_pages_for(self, request: DecodeRequest) -> int:
        """Pages that it takes from others, cached or not."""
        return self._pages_for(request) - len(self._shared_pages(request))

    def _shared_pages(self, request: DecodeRequest) -> list[int]:
        """Those of the choice that has brought the prompt, but for the last token's; none when it has ended."""
        submit = request.submit
        if submit.prompt_of is None:
            return []
        return self._steps.whole_pages(submit.prompt_of)[: (len(submit.prompt_ids) - 1) // self._page_size]
