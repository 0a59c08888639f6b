"""Queue of decode requests that wait for pages. Sans I/O.

A request whose prompt is computed by this replica gets its pages from the step scheduler, which also uses the tiers.
It leaves the queue when enough pages are free. These pages stay reserved until the request has them.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from cluster.spec.ids import Room
from cluster.spec.kv import NO_PAGE, pages_for
from workers.cache.lifetimes import PageLists, live_pages
from workers.cache.page_allocator import Demand
from workers.scheduler.decode_request import DecodeRequest
from workers.scheduler.sequence import TokenSequence
from workers.scheduler.shares import Shares, Turns
from workers.scheduler.step_scheduler import StepScheduler
from workers.scheduler.waiting import Waiting

_MOST_AT_ONCE = 32
"""Maximum number of requests that get pages in one round while sequences run, since these wait meanwhile."""


class _Space(NamedTuple):
    """Free pages that waiting requests may take."""

    num_free: int
    oldest: DecodeRequest
    oldest_pages: int
    """Number of free pages that the oldest request needs."""

    def count_overtaking(self, request: DecodeRequest, needed: int) -> int:
        """Return how many of the oldest request's pages another request would take. 0 if both fit."""
        return 0 if request is self.oldest or needed + self.oldest_pages <= self.num_free else needed


class DecodeQueue:
    """Queue of requests by priority. Among equals, the tenant that holds the fewest pages per weight goes first.

    Further choices of a prompt wait until the first choice has the prompt. Requests whose prompt is computed here wait
    until their pages are read from storage.
    """

    def __init__(self, scheduler: StepScheduler) -> None:
        self._scheduler = scheduler
        self._allocator, self._tiers, self._page_size = scheduler.allocator, scheduler.tiers, scheduler.page_size
        self._fetching: dict[Room, DecodeRequest] = {}
        self._promised: dict[Room, int] = {}
        """Number of pages reserved for each request that waits in the step scheduler."""
        self._num_settled = 0
        """Number of promises that have been kept or withdrawn, or are no longer needed."""
        self._queue = Waiting[DecodeRequest](self._count_held)
        self._num_growing = 0
        """Number of free pages left to the running sequences."""
        self._granted: dict[Room, DecodeRequest] = {}
        """Requests that left the queue with pages or a promise, and have not ended."""
        self._ahead: DecodeRequest | None = None
        """Request that goes before the preempted sequences until it has left the queue."""
        self._choices: dict[Room, list[DecodeRequest]] = {}
        """Further choices by the first choice's room."""

    def __len__(self) -> int:
        return len(self._queue) + len(self._fetching) + sum(map(len, self._choices.values()))

    @property
    def awaits_storage(self) -> bool:
        """Return whether a request waits for its pages from storage, and not yet for free pages."""
        return bool(self._fetching)

    def add(self, request: DecodeRequest, now_s: float) -> None:
        if self._tiers and request.submit.prefill is None and (keys := self._keys(request)):
            self._tiers.expect(request.room, keys, now_s)
            self._fetching[request.room] = request
        else:
            self._queue.add(request)

    def add_choice(self, request: DecodeRequest, awaited: Room) -> None:
        """Add a choice that gets no pages until ``end_wait`` is called for its first choice."""
        self._choices.setdefault(awaited, []).append(request)

    def end_wait(self, awaited: Room) -> list[DecodeRequest]:
        """Remove and return the choices that waited for a room."""
        return self._choices.pop(awaited, [])

    def remove(self, request: DecodeRequest) -> None:
        """Forget a request that ends."""
        self._queue.remove(request.room)
        self._granted.pop(request.room, None)
        self._fetching.pop(request.room, None)
        awaited = request.submit.prompt_of
        if awaited is not None and request in self._choices.get(awaited, []):
            self._choices[awaited].remove(request)
            if not self._choices[awaited]:
                del self._choices[awaited]

    def grant(self, now_s: float) -> list[DecodeRequest]:
        """Give pages to the requests that can start. Remove these requests from the queue and return them.

        Preempted sequences in the step scheduler take precedence, except over tenants that hold fewer pages. Other
        requests may overtake one that does not fit, as long as the oldest request does not starve.
        """
        self._take_fetched(now_s)
        self._forget_kept_promises()
        if not self._queue:
            return []
        self._claim_share()
        waiting = self._scheduler.holders.waiting
        preempted = [sequence for sequence in waiting if sequence.room not in self._promised]
        untried = self._queue.untried(self._num_gains)
        self._num_growing = self._count_growing() if untried else 0
        is_contested = len({*self._queue.tenants, *(sequence.tenant for sequence in preempted)}) > 1
        held = self._count_held() if is_contested and (untried or preempted) else Shares()
        limit = min((held.used(sequence.tenant) for sequence in preempted), default=math.inf)
        self._choose_ahead(held, limit)
        return self._grant_in_turn(untried, held, limit)

    @property
    def _num_gains(self) -> int:
        """Return a number that changes whenever requests that could not start may have enough pages."""
        return self._allocator.num_gains + self._num_settled

    def _forget_kept_promises(self) -> None:
        waiting, before = self._scheduler.holders.waiting, len(self._promised)
        self._promised = {room: pages for room, pages in self._promised.items() if room in waiting}
        self._num_settled += before - len(self._promised)

    def _claim_share(self) -> None:
        """Preempt tenants above their share so that the oldest waiting request can start, if its tenant stays within.

        A tenant's share is its weight's part of all pages. Promises go first, as their requests have computed nothing.
        """
        oldest = self._queue.oldest
        if oldest is None or not self._queue.is_blocked(oldest, self._num_gains):
            return
        requests = [*self._granted.values(), *self._queue.candidates()]
        weights = {request.tenant: request.submit.weight for request in requests}
        if len(weights) == 1:
            return
        held, share = self._count_held(), self._allocator.num_pages / sum(weights.values())
        if held.used(oldest.tenant) > share and min(map(held.used, self._queue.tenants)) < share:
            self._queue.end_turn()
            oldest = self._queue.oldest
            assert oldest is not None
        num_new = self._count_new(oldest)
        if held.used(oldest.tenant) + num_new / oldest.submit.weight > share:
            return
        self._num_growing = self._count_growing()
        num_wanted = self._withdraw_promises(num_new + self._num_reserved - self._allocator.num_free, held, share)
        if self._scheduler.holders.preempt_above(share, held, num_wanted, self._growth_of):
            # Otherwise, those that lost these pages would take them back.
            self._ahead = oldest

    def _withdraw_promises(self, num_wanted: int, held: Shares, share: float) -> int:
        """Withdraw the latest promises to tenants above ``share``. Return how many pages are still wanted.

        Their requests wait in the step scheduler like preempted ones.
        """
        for room in reversed([*self._promised]):
            request = self._granted[room]
            if num_wanted > 0 and held.used(request.tenant) > share:
                num_pages = self._promised.pop(room)
                self._num_settled += 1
                held.charge(request, -num_pages)
                num_wanted -= num_pages
        return num_wanted

    def _choose_ahead(self, held: Shares, limit: float) -> None:
        """Choose the request that goes before the preempted sequences, if there are any, unless it is already chosen.
        Its tenant holds fewer than ``limit`` pages, which is what the preempted sequences' tenants hold.
        """
        if self._ahead is not None and self._ahead.room in self._queue and limit < math.inf:
            return
        self._ahead = None
        if limit < math.inf and any(held.used(tenant) < limit for tenant in self._queue.tenants):
            if self._queue.oldest is not None and held.used(self._queue.oldest.tenant) >= limit:
                self._queue.end_turn()
            self._ahead = self._queue.oldest

    def _grant_in_turn(self, requests: list[DecodeRequest], held: Shares, limit: float) -> list[DecodeRequest]:
        """Give pages to the requests that can start, unless their tenants hold ``limit`` pages or more."""
        granted: list[DecodeRequest] = []
        space: _Space | None = None
        for request in Turns(requests, held):
            if len(granted) == _MOST_AT_ONCE and self._scheduler.holders.running:
                break
            if held.used(request.tenant) >= limit and request is not self._ahead:
                continue
            space = space or self._free_space()
            pages = self._find_held(request, space)
            if pages is None:
                self._queue.note_blocked(request)
                continue
            num_new = self._count_new(request)
            self._queue.note_overtaken(request, space.count_overtaking(request, num_new))
            self._queue.remove(request.room)
            space = None
            self._give_pages(request, pages)
            self._granted[request.room] = request
            held.charge(request, request.num_prompt_pages)
            granted.append(request)
        return granted

    def _count_held(self) -> Shares:
        """Return how many pages each tenant's requests hold or are promised."""
        held = Shares.of_pages(self._granted.values())
        for room, num_pages in self._promised.items():
            held.charge(self._granted[room], num_pages)
        return held

    @property
    def _num_reserved(self) -> int:
        """Number of free pages that new requests must leave."""
        return sum(self._promised.values()) + self._num_growing

    def _count_growing(self) -> int:
        """Return how many pages the running sequences need next.

        If new requests took these too, a sequence that runs would soon be preempted.
        """
        return sum(map(self._growth_of, self._scheduler.holders.running.values()))

    def _growth_of(self, sequence: TokenSequence) -> int:
        """Return how many pages a running sequence needs next."""
        most_tokens = sequence.prompt_len + sequence.submit.stopping.max_tokens - 1
        return (pages_for(most_tokens, self._page_size) > sequence.kv.num_pages) * self._allocator.lifetimes.num

    def _take_fetched(self, now_s: float) -> None:
        for room in list(self._fetching):
            if self._tiers is None or not self._tiers.prefetcher.is_waiting(room, now_s):
                self._queue.add(self._fetching.pop(room))

    def _free_space(self) -> _Space:
        oldest, num_free = self._queue.oldest, self._allocator.num_free - self._num_reserved
        assert oldest is not None
        return _Space(num_free, oldest, self._count_new(oldest))

    def _find_held(self, request: DecodeRequest, space: _Space) -> PageLists | None:
        """Return the request's cached or shared pages. None if its other pages are not available now."""
        shared, oldest_pages = self._shared_pages(request), space.oldest_pages
        most = max(space.num_free - oldest_pages, self._queue.most_overtaking(request, oldest_pages))
        if _total(self._demands(request, shared)) > most and request is not space.oldest:
            return None
        held = self._seen(request, shared or self._allocator.find(self._keys(request)))
        demands = self._demands(request, held)
        # This check comes first, since it is cheaper than asking the allocator.
        if _total(demands) > space.num_free:
            return None
        reserved = (self._num_reserved, 0)
        return held if self._allocator.can_allocate([*demands, reserved], live_pages(held)) else None

    def _give_pages(self, request: DecodeRequest, held: PageLists) -> None:
        """Allocate a request's pages, or reserve them if the step scheduler will allocate them."""
        if request.submit.prefill is None and not self._shared_pages(request):
            self._promised[request.room] = self._count_new(request)
            return
        request.num_held_pages = len(held[0])
        new = self._allocator.allocate(self._demands(request, held), live_pages(held))
        request.kv.pages = [
            found + [NO_PAGE] * (request.num_prompt_pages - len(found) - len(pages)) + pages
            for found, pages in zip(held, new, strict=True)
        ]
        if self._tiers:
            self._tiers.note_hits(self._keys(request)[: request.num_held_pages])

    def _keys(self, request: DecodeRequest) -> list[bytes]:
        return request.prompt_keys(self._page_size) if self._allocator.is_caching else []

    def _demands(self, request: DecodeRequest, held: PageLists) -> list[Demand]:
        """Return each lifetime's demand after the held pages. A transfer fills only pages that later tokens can see."""
        num_held, lifetimes = len(held[0]) if held else 0, self._allocator.lifetimes
        num_seen = len(request.submit.prompt_ids) if request.submit.prefill is not None else 0
        return [(request.num_prompt_pages - max(num_held, first), 0) for first in lifetimes.first_pages(num_seen)]

    def _seen(self, request: DecodeRequest, held: PageLists) -> PageLists:
        """Return the held pages, with ``NO_PAGE`` for pages that the first token computed here cannot see."""
        num_tokens = (
            len(held[0]) * self._page_size if request.submit.prefill is None else len(request.submit.prompt_ids)
        )
        return self._allocator.lifetimes.visible(held, num_tokens)

    def _count_new(self, request: DecodeRequest) -> int:
        """Return the number of pages that the request needs in addition to pages that other choices hold."""
        return _total(self._demands(request, self._shared_pages(request)))

    def _shared_pages(self, request: DecodeRequest) -> PageLists:
        """Return the first choice's full prompt pages. Empty if that choice has ended or freed some needed pages."""
        submit = request.submit
        if submit.prompt_of is None:
            return []
        num_full = (len(submit.prompt_ids) - 1) // self._page_size
        pages = [ids[:num_full] for ids in self._scheduler.holders.full_pages(submit.prompt_of)]
        is_usable = pages and pages[0] and self._allocator.lifetimes.can_continue(pages)
        return pages if is_usable else []


def _total(demands: Iterable[Demand]) -> int:
    return sum(count for count, _ in demands)
