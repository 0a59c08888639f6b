"""Decode requests without pages: the order in which they get them, and which pages are already here. Sans I/O.

A request that is computed here from its beginning gets pages from the step scheduler, which finds what it can in the
tiers. It leaves this queue when there are enough, which stay promised to it until it has them.
"""

from collections.abc import Iterator
from typing import NamedTuple

from cluster.spec.ids import Room
from workers.cache.page_allocator import PageAllocator
from workers.hicache.tiers import Tiers
from workers.scheduler.decode_request import DecodeRequest, cacheable_keys
from workers.scheduler.steps import StepScheduler
from workers.scheduler.waiting import Waiting


class _Space(NamedTuple):
    """Pages that waiting requests may take."""

    num_free: int
    oldest: DecodeRequest
    oldest_pages: int
    """Pages that the oldest request needs from the free ones."""
    most_passing: int
    """Most pages that another request may take."""

    def count_passing(self, request: DecodeRequest, needed: int) -> int:
        """Count pages that the oldest might have to wait for if this one took those it needs; 0 if both fit."""
        return 0 if request is self.oldest or needed + self.oldest_pages <= self.num_free else needed


class DecodeQueue:
    """Queue by priority, limited by free pages.

    Further choices of a prompt wait until the one that brings it has it, and a request computed here waits for its
    pages in storage.
    """

    def __init__(
        self, allocator: PageAllocator, steps: StepScheduler, page_size: int, tiers: Tiers | None = None
    ) -> None:
        self._allocator = allocator
        self._steps = steps
        self._page_size = page_size
        self._tiers = tiers
        self._fetching: dict[Room, DecodeRequest] = {}
        self._promised: dict[Room, int] = {}
        """Pages promised to requests that have left for the step scheduler and that it has not allocated yet."""
        self._queue = Waiting[DecodeRequest]()
        self._choices: dict[Room, list[DecodeRequest]] = {}
        """Waiting choices by the room that they wait for."""

    def __len__(self) -> int:
        return len(self._queue) + len(self._fetching) + sum(map(len, self._choices.values()))

    def add(self, request: DecodeRequest, now_s: float) -> None:
        if self._allocator.is_caching:
            request.page_keys = cacheable_keys(request.submit, self._page_size)
        if self._tiers and request.submit.prefill is None and request.page_keys:
            self._tiers.expect(request.room, request.page_keys, now_s)
            self._fetching[request.room] = request
        else:
            self._queue.add(request)

    def add_choice(self, request: DecodeRequest, awaited: Room) -> None:
        """Add a choice that waits for a room; it is not granted pages before ``end_wait``."""
        self._choices.setdefault(awaited, []).append(request)

    def end_wait(self, awaited: Room) -> list[DecodeRequest]:
        """Return the requests that waited for a room, and forget them."""
        return self._choices.pop(awaited, [])

    def remove(self, request: DecodeRequest) -> None:
        """Remove a request if it waits."""
        self._queue.remove(request.room)
        self._fetching.pop(request.room, None)
        awaited = request.submit.prompt_of
        if awaited is not None and request in self._choices.get(awaited, []):
            self._choices[awaited].remove(request)
            if not self._choices[awaited]:
                del self._choices[awaited]

    def grant(self, now_s: float) -> Iterator[DecodeRequest]:
        """Yield requests that can start, with their pages unless the step scheduler allocates them.

        A sequence that waits there goes before them all. If one does not fit, the next may, as long as the oldest one
        is not starved.
        """
        self._take_fetched(now_s)
        self._promised = {room: pages for room, pages in self._promised.items() if self._steps.is_waiting(room)}
        if self._steps.num_waiting > len(self._promised):
            return
        space: _Space | None = None
        for request in self._queue.untried(self._allocator.num_gains):
            space = space or self._look()
            held = self._find_held(request, space)
            if held is None:
                if not self._promised:
                    self._queue.note_in_vain(request)
                continue
            self._queue.note_passed(space.count_passing(request, self._new_pages_for(request)))
            self._queue.remove(request.room)
            space = None
            if request.submit.prefill is None and not self._shared_pages(request):
                self._promised[request.room] = request.num_pages
                yield request
                continue
            request.pages = self._allocator.allocate(request.num_pages, held)
            request.num_held = len(held)
            if self._tiers:
                self._tiers.note_hits(request.page_keys[: len(held)])
            yield request

    @property
    def _num_promised(self) -> int:
        return sum(self._promised.values())

    def _take_fetched(self, now_s: float) -> None:
        for room in list(self._fetching):
            if self._tiers is None or not self._tiers.is_waiting(room, now_s):
                self._queue.add(self._fetching.pop(room))

    def _look(self) -> _Space:
        oldest, num_free = self._queue.oldest, self._allocator.num_free - self._num_promised
        assert oldest is not None
        oldest_pages = self._new_pages_for(oldest)
        most_passing = max(num_free - oldest_pages, self._queue.most_passing(oldest_pages))
        return _Space(num_free, oldest, oldest_pages, most_passing)

    def _find_held(self, request: DecodeRequest, space: _Space) -> list[int] | None:
        """Return the request's cached pages; None if it may not or cannot have the others."""
        shared = self._shared_pages(request)
        if request.num_pages - len(shared) > space.most_passing and request is not space.oldest:
            return None
        held = shared or self._allocator.find(request.page_keys)
        # Cheaper than the allocator's answer, and mostly enough.
        if request.num_pages - len(held) > space.num_free:
            return None
        return held if self._allocator.can_allocate(request.num_pages + self._num_promised, held) else None

    def _new_pages_for(self, request: DecodeRequest) -> int:
        """Return the number of pages that it takes from others, cached or not."""
        return request.num_pages - len(self._shared_pages(request))

    def _shared_pages(self, request: DecodeRequest) -> list[int]:
        """Return the pages of the choice that brought the prompt, except the last token's; none if it has ended."""
        submit = request.submit
        if submit.prompt_of is None:
            return []
        return self._steps.whole_pages(submit.prompt_of)[: (len(submit.prompt_ids) - 1) // self._page_size]
