"""Decode requests without pages: in which order they get them, and what of them is here already. Sans I/O.

One that is computed here from its beginning gets them from the step scheduler, which finds in the tiers what it can. It
leaves when there are enough, which are promised to it until it has them.
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
    """Pages that the oldest one takes from others."""
    most_passing: int
    """Most pages that another one may take."""

    def count_passing(self, request: DecodeRequest, needed: int) -> int:
        """Pages that the oldest might have to wait for if this one took those it needs: none if both fit."""
        return 0 if request is self.oldest or needed + self.oldest_pages <= self.num_free else needed


class DecodeQueue:
    """By priority, while there are pages.

    Further choices of a prompt wait until the one that brings it has it, and one that is computed here waits for
    its pages in storage.
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
        """Pages of those that have left for the step scheduler, as far as it has not given them any."""
        self._queue = Waiting[DecodeRequest]()
        self._choices: dict[Room, list[DecodeRequest]] = {}
        """By the room that they wait for."""

    def __len__(self) -> int:
        return len(self._queue) + len(self._fetching) + sum(map(len, self._choices.values()))

    def add(self, request: DecodeRequest, now_s: float) -> None:
        """Take one in."""
        if self._allocator.is_caching:
            request.page_keys = cacheable_keys(request.submit, self._page_size)
        if self._tiers and request.submit.prefill is None and request.page_keys:
            self._tiers.expect(request.room, request.page_keys, now_s)
            self._fetching[request.room] = request
        else:
            self._queue.add(request)

    def add_choice(self, request: DecodeRequest, awaited: Room) -> None:
        """Take one in that waits for a room; it has no turn before ``end_wait``."""
        self._choices.setdefault(awaited, []).append(request)

    def end_wait(self, awaited: Room) -> list[DecodeRequest]:
        """Return the requests that waited for a room, and forget them."""
        return self._choices.pop(awaited, [])

    def remove(self, request: DecodeRequest) -> None:
        """Forget one, if it waits."""
        self._queue.remove(request.room)
        self._fetching.pop(request.room, None)
        awaited = request.submit.prompt_of
        if awaited is not None and request in self._choices.get(awaited, []):
            self._choices[awaited].remove(request)
            if not self._choices[awaited]:
                del self._choices[awaited]

    def grant(self, now_s: float) -> Iterator[DecodeRequest]:
        """Requests that can have pages now, with them, or without where the step scheduler gives them.

        A sequence that waits there goes before them all. Where one does not fit the next may, as far as the oldest one
        is not put off for ever.
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
        """The pages of it that are here already; None if it may not or cannot have the others."""
        shared = self._shared_pages(request)
        if request.num_pages - len(shared) > space.most_passing and request is not space.oldest:
            return None
        held = shared or self._allocator.find(request.page_keys)
        # Cheaper than the allocator's answer, and mostly enough.
        if request.num_pages - len(held) > space.num_free:
            return None
        return held if self._allocator.can_allocate(request.num_pages + self._num_promised, held) else None

    def _new_pages_for(self, request: DecodeRequest) -> int:
        """Pages that it takes from others, cached or not."""
        return request.num_pages - len(self._shared_pages(request))

    def _shared_pages(self, request: DecodeRequest) -> list[int]:
        """Pages of the choice that has brought the prompt, but for the last token's; none when it has ended."""
        submit = request.submit
        if submit.prompt_of is None:
            return []
        return self._steps.whole_pages(submit.prompt_of)[: (len(submit.prompt_ids) - 1) // self._page_size]
