"""Requests in a decode leader: their states, transfer sessions and queue, and the quarantine of their pages.

A request whose prompt is computed by this replica gets its pages from the step scheduler, which also uses the tiers.
It leaves the queue when enough pages are free. These pages stay reserved until the request has them. Sans I/O.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from cluster.spec.ids import Peer, Room
from cluster.spec.kv import NO_PAGE
from cluster.spec.messages import PhaseTimes
from cluster.spec.registry import RankRecord, Verify
from cluster.spec.transfer_messages import Ticket
from transfer.page_assignment import copies_of
from transfer.receiver import ReceiverSession
from workers.cache.page_allocator import Demand, PageAllocator, PageLists, live_pages
from workers.hicache.tiers import Tiers
from workers.scheduler.sequence import TokenSequence, Waiting
from workers.scheduler.step_scheduler import StepScheduler

QUARANTINE_LIMIT = 0.25
"""Share of the pool in quarantine above which a replica drains and restarts. Below it, a restart is not worthwhile."""


class DecodeState(Enum):
    QUEUED = "queued"
    """Waiting for free pages, for pages from storage, or for the first choice, which does not have the prompt yet."""
    RECEIVING = "receiving"
    """Pages allocated. Once no step under way can write to them, the ticket is sent, and prefill may write to them."""
    VERIFYING = "verifying"
    """Pages received. The ranks named in the digests compare their pages with the digests."""
    STOPPING = "stopping"
    """Failed or cancelled. Pages are held until prefill can no longer write to them."""
    RUNNING = "running"
    """Passed to the step scheduler, where the request may still wait for pages."""
    ENDED = "ended"
    """Ended. Holds no pages."""


MOVES = {
    DecodeState.QUEUED: frozenset({DecodeState.RECEIVING, DecodeState.RUNNING, DecodeState.ENDED}),
    DecodeState.RECEIVING: frozenset(
        {DecodeState.VERIFYING, DecodeState.RUNNING, DecodeState.STOPPING, DecodeState.ENDED}
    ),
    DecodeState.VERIFYING: frozenset({DecodeState.RUNNING, DecodeState.ENDED}),
    DecodeState.STOPPING: frozenset({DecodeState.ENDED}),
    DecodeState.RUNNING: frozenset({DecodeState.ENDED}),
    DecodeState.ENDED: frozenset[DecodeState](),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """Properties of a decode replica."""

    me: Peer
    records: Sequence[RankRecord]
    """Records of all ranks, by global rank."""
    dp_rank: int = 0
    transfer_timeout_s: float
    quarantine_limit: float = QUARANTINE_LIMIT
    verify: Verify = Verify.COUNTS
    settle_s: float
    """Maximum time for which bytes may still arrive after their sender has failed or died."""

    @property
    def page_size(self) -> int:
        return self.records[0].layout.page_size

    @property
    def page_bytes(self) -> list[int]:
        """Return the bytes per page by lifetime, summed over the DP rank. Ranks with the same heads count only once."""
        own = [record.layout for record in self.records if record.coords.dp == self.dp_rank]
        lifetimes = range(own[0].num_lifetimes)
        return [
            sum(layout.bytes_of(lifetime) for layout in own) // copies_of(self.records[0]) for lifetime in lifetimes
        ]


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeRequest(TokenSequence):
    """Request in a decode leader. While RUNNING, it is in the step scheduler. It may have pages before that."""

    num_prompt_pages: int
    arrived_s: float
    granted_s: float = 0.0
    """Time at which pages were allocated."""
    result_s: float = 0.0
    """Time at which prefill's first token arrived."""
    state: DecodeState = DecodeState.QUEUED
    num_held_pages: int = 0
    """Number of leading pages shared with the cache or another choice. They are never part of the ticket."""
    session: ReceiverSession | None = None
    stopping_since_s: float = 0.0
    """Time at which the request entered STOPPING."""
    has_prompt: bool = False
    """True once the prompt's KV and the first token have arrived or been computed."""

    @property
    def new_pages(self) -> PageLists:
        """Return the pages after the shared ones."""
        return [pages[self.num_held_pages :] for pages in self.kv.pages]

    def prompt_keys(self, page_size: int) -> list[bytes]:
        """Return the keys of the prompt pages that can be found in the cache."""
        # If this replica computes the prompt, the last token is always computed, for its logits.
        num_cacheable = len(self.submit.prompt_ids) - (self.submit.prefill is None)
        return self.keys_of(num_cacheable, page_size)

    def phases(self, now_s: float) -> PhaseTimes | None:
        """Return the durations of the phases up to the first token. None for a choice that shares a prompt."""
        submit, result = self.submit, self.session.result if self.session is not None else None
        if submit.prompt_of is not None:
            return None
        queue_s = self.granted_s - self.arrived_s
        if result is None or submit.prefill is None:
            here_s = now_s - self.granted_s
            return PhaseTimes(prefill=None, decode=submit.decode.replica, decode_queue_s=queue_s, prefill_s=here_s)
        return PhaseTimes(
            prefill=submit.prefill.replica,
            decode=submit.decode.replica,
            decode_queue_s=queue_s,
            bootstrap_s=result.bootstrap_s,
            prefill_s=result.prefill_s,
            transfer_s=now_s - self.result_s,
        )


def receiver_session(settings: DecodeSettings, request: DecodeRequest, prefill: Peer) -> ReceiverSession:
    pages = request.new_pages
    counts = [len(live_pages([of_lifetime])) for of_lifetime in pages]
    ticket = Ticket(
        room=request.room,
        decode=settings.me,
        prefill_incarnation=prefill.incarnation,
        pages=pages,
        num_held_pages=request.num_held_pages,
        dp_rank=settings.dp_rank,
        wanted_dp_rank=request.submit.dp_rank,
        geometry=settings.records[0].geometry,
    )
    return ReceiverSession(
        ticket,
        prefill,
        num_pages=sum(counts),
        num_bytes=sum(count * size for count, size in zip(counts, settings.page_bytes, strict=True)),
        num_ranks=len(settings.records),
        silence_s=settings.transfer_timeout_s,
        settle_s=settings.settle_s,
        verify=settings.verify,
        num_copies=copies_of(settings.records[0]),
    )


def stopping(requests: Iterable[DecodeRequest], since_s: float = math.inf) -> list[DecodeRequest]:
    """Return the requests that entered STOPPING at or before ``since_s``."""
    return [
        request for request in requests if request.state is DecodeState.STOPPING and request.stopping_since_s <= since_s
    ]


def count_pages(requests: Iterable[DecodeRequest]) -> int:
    return sum(len(live_pages(request.new_pages)) for request in requests)


def all_wait(requests: Iterable[DecodeRequest], scheduler: StepScheduler) -> bool:
    """Return whether all these requests wait for pages and none of them can get any now."""
    waiting = {DecodeState.QUEUED} if scheduler.holders.running else {DecodeState.QUEUED, DecodeState.RUNNING}
    return all(request.state in waiting for request in requests) and not scheduler.has_work()


def describe(requests: Sequence[DecodeRequest], num_pages: int, limit: float) -> str:
    """Return why these requests end the replica: too many pages are in quarantine, or all other requests wait."""
    is_beyond = count_pages(requests) > limit * num_pages
    reason = f"more than {limit:.0%} of the pool" if is_beyond else "and a request is waiting for them"
    names = ", ".join(sorted({request.session.prefill.replica for request in requests if request.session}))
    return (
        f"{count_pages(requests)} of {num_pages} pages are in quarantine, {reason}: "
        f"{names} did not confirm that writing has stopped"
    )


class _Space(NamedTuple):
    """Free pages that waiting requests may take."""

    num_free: int
    oldest: DecodeRequest
    oldest_pages: int
    """Number of free pages that the oldest request needs."""
    most_overtaking: int
    """Maximum number of pages that other requests may take before the oldest request gets its own."""

    def count_overtaking(self, request: DecodeRequest, needed: int) -> int:
        """Return how many of the oldest request's pages another request would take. 0 if both fit."""
        return 0 if request is self.oldest or needed + self.oldest_pages <= self.num_free else needed


class DecodeQueue:
    """Queue of requests by priority.

    Further choices of a prompt wait until the first choice has the prompt. Requests whose prompt is computed here wait
    until their pages are read from storage.
    """

    def __init__(
        self, allocator: PageAllocator, scheduler: StepScheduler, page_size: int, tiers: Tiers | None = None
    ) -> None:
        self._allocator = allocator
        self._scheduler = scheduler
        self._page_size = page_size
        self._tiers = tiers
        self._fetching: dict[Room, DecodeRequest] = {}
        self._promised: dict[Room, int] = {}
        """Number of pages reserved for each request that waits in the step scheduler."""
        self._queue = Waiting[DecodeRequest]()
        self._choices: dict[Room, list[DecodeRequest]] = {}
        """Further choices by the first choice's room."""

    def __len__(self) -> int:
        return len(self._queue) + len(self._fetching) + sum(map(len, self._choices.values()))

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
        self._queue.remove(request.room)
        self._fetching.pop(request.room, None)
        awaited = request.submit.prompt_of
        if awaited is not None and request in self._choices.get(awaited, []):
            self._choices[awaited].remove(request)
            if not self._choices[awaited]:
                del self._choices[awaited]

    def grant(self, now_s: float) -> list[DecodeRequest]:
        """Give pages to the requests that can start. Remove these requests from the queue and return them.

        Sequences that wait in the step scheduler take precedence. Other requests may overtake one that does not fit, as
        long as the oldest request does not starve.
        """
        self._take_fetched(now_s)
        self._promised = {
            room: pages for room, pages in self._promised.items() if room in self._scheduler.holders.waiting
        }
        if self._scheduler.num_waiting > len(self._promised):
            return []
        granted: list[DecodeRequest] = []
        space: _Space | None = None
        for request in self._queue.untried(self._allocator.num_gains):
            space = space or self._free_space()
            held = self._find_held(request, space)
            if held is None:
                if not self._promised:
                    self._queue.note_blocked(request)
                continue
            self._queue.note_overtaken(space.count_overtaking(request, self._count_new(request)))
            self._queue.remove(request.room)
            space = None
            self._give_pages(request, held)
            granted.append(request)
        return granted

    @property
    def _num_promised(self) -> int:
        return sum(self._promised.values())

    def _take_fetched(self, now_s: float) -> None:
        for room in list(self._fetching):
            if self._tiers is None or not self._tiers.prefetcher.is_waiting(room, now_s):
                self._queue.add(self._fetching.pop(room))

    def _free_space(self) -> _Space:
        oldest, num_free = self._queue.oldest, self._allocator.num_free - self._num_promised
        assert oldest is not None
        oldest_pages = self._count_new(oldest)
        most_overtaking = max(num_free - oldest_pages, self._queue.most_overtaking(oldest_pages))
        return _Space(num_free, oldest, oldest_pages, most_overtaking)

    def _find_held(self, request: DecodeRequest, space: _Space) -> PageLists | None:
        """Return the request's cached or shared pages. None if its other pages are not available now."""
        shared = self._shared_pages(request)
        if _total(self._demands(request, shared)) > space.most_overtaking and request is not space.oldest:
            return None
        held = self._seen(request, shared or self._allocator.find(self._keys(request)))
        demands = self._demands(request, held)
        # This check comes first, since it is cheaper than asking the allocator.
        if _total(demands) > space.num_free:
            return None
        promised = (self._num_promised, 0)
        return held if self._allocator.can_allocate([*demands, promised], live_pages(held)) else None

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
