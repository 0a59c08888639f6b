"""Sequences that hold pages and sequences that wait for them. Sans I/O.

A waiting sequence starts as soon as pages are free for everything after its cached prefix, and then grows one page at a
time. If the pool runs out of pages, one of the least urgent sequences is preempted: the latest of the tenant that holds
the most pages. Its KV that is not cached is then computed again, which does not change the output.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from cluster.spec.ids import Room
from cluster.spec.kv import NO_PAGE, pages_for
from cluster.spec.tiers import CachedTokens, TierJob
from workers.cache.lifetimes import Gap, PageLists, live_pages, tier_page
from workers.cache.page_allocator import Demand, PageAllocator
from workers.hicache.tiers import Tiers
from workers.scheduler.sequence import KvState, PageLoad, TokenSequence, urgency
from workers.scheduler.shares import Shares
from workers.scheduler.waiting import Waiting


class PageHolders:
    """Sequences of one step scheduler. Sequences with pages run; all others wait."""

    def __init__(self, allocator: PageAllocator, page_size: int, tiers: Tiers | None) -> None:
        self._allocator, self._page_size, self._tiers = allocator, page_size, tiers
        self._num_arrivals = 0
        self._releases: list[Room] = []
        self.running: dict[Room, TokenSequence] = {}
        self.waiting = Waiting[TokenSequence](lambda: Shares.of_pages(self.running.values()))
        self._num_removed = 0
        """Number of sequences removed so far. The caller may free their pages later."""
        self._leaving: list[tuple[TokenSequence, KvState]] = []
        """Sequences removed during a load. The load may still write to their pages."""
        self.num_preemptions = 0

    def add(self, sequence: TokenSequence) -> None:
        sequence.arrival_number = self._num_arrivals
        self._num_arrivals += 1
        if not sequence.kv.pages:
            self.waiting.add(sequence)
            return
        assert sequence.kv.num_pages >= pages_for(sequence.kv.num_computed_tokens, self._page_size)
        self.running[sequence.room] = sequence
        self.put_into_cache(sequence)

    def remove(self, room: Room) -> PageLists:
        """Remove a sequence and return its pages for the caller to free, except pages that are being loaded."""
        sequence = self._take_out(room)
        if sequence is None:
            return []
        kv = sequence.kv
        if kv.load is None:
            self._release(sequence, kv)
        else:
            self._leaving.append((sequence, kv))
            sequence.kv = KvState()
            if kv.load.is_layerwise:
                self._allocator.allocate([], live_pages(kv.pages))
                sequence.kv = replace(kv, pages=[list(pages) for pages in kv.pages], load=None)
        return sequence.kv.pages

    def retire(self, room: Room) -> None:
        sequence = self._take_out(room)
        if sequence is None:
            return
        kv, sequence.kv = sequence.kv, KvState()
        if kv.load is not None:
            self._leaving.append((sequence, kv))
        else:
            self._leave_to_cache(sequence, kv)

    def _take_out(self, room: Room) -> TokenSequence | None:
        """Remove a sequence. Return it if it was running."""
        sequence = self.running.pop(room, None)
        if sequence is None:
            self.waiting.remove(room)
        else:
            self._num_removed += 1
        return sequence

    def full_pages(self, room: Room) -> PageLists:
        known = self.running.get(room)
        if known is None:
            return []
        return [pages[: known.kv.num_computed_tokens // self._page_size] for pages in known.kv.pages]

    def can_start(self, sequence: TokenSequence) -> bool:
        """Return whether a waiting sequence can get its pages without taking pages reserved for the oldest one."""
        oldest = self.waiting.oldest
        assert oldest is not None, f"room {sequence.room} is not waiting"
        num_gains = self._allocator.num_gains + self._num_removed
        if self.waiting.is_blocked(sequence, num_gains):
            return False
        if self._tiers and (key := self.next_key(sequence)) is not None and self._tiers.is_loading(key):
            return False
        most_overtaking = self.waiting.most_overtaking(sequence, self._pages_of(oldest))
        may_overtake = self._count_overtaking(sequence, oldest) <= most_overtaking
        can_start = may_overtake and self._allocator.can_allocate(self._all_demands(sequence))
        if may_overtake and not can_start:
            cached = self._find_cached(sequence)
            can_start = self._allocator.can_allocate(
                _demands(sequence, self._gaps(sequence, cached)), live_pages(cached)
            )
        if not can_start:
            self.waiting.note_blocked(sequence)
        return can_start

    def start(self, sequence: TokenSequence, *, is_alone: bool = False) -> bool:
        """Give a waiting sequence its pages. Return False if that is impossible or the pages must be loaded first.

        If the sequence is alone in the next step, that step starts during the load, since no other sequence is delayed.
        """
        if not self.can_start(sequence):
            return False
        assert self.waiting.oldest is not None
        self.waiting.note_overtaken(sequence, self._count_overtaking(sequence, self.waiting.oldest))
        self.waiting.remove(sequence.room)
        pages = self._find_cached(sequence)
        prefix, gaps = self._prefix_keys(sequence)[: len(pages[0])], self._gaps(sequence, pages)
        new = self._allocator.allocate(_demands(sequence, gaps), live_pages(pages))
        for gap, ids in zip(gaps, new, strict=True):
            pages[gap.lifetime][gap.first : gap.end] = ids
        num_cached = min(gap.first for gap in gaps) * self._page_size
        sequence.kv = KvState.after(num_cached, pages)
        self.running[sequence.room] = sequence
        if self._tiers:
            self._tiers.note_hits(prefix)
            is_layerwise = is_alone and self._tiers.can_load_layerwise
            self._load_from_host(self._tiers, sequence, prefix, gaps, is_layerwise=is_layerwise)
        return not sequence.waits_for_load

    def _load_from_host(
        self, tiers: Tiers, sequence: TokenSequence, prefix: list[bytes], gaps: list[Gap], *, is_layerwise: bool
    ) -> None:
        """Load the missing pages of a prefix from host memory."""
        kv = sequence.kv
        pages = [
            tier_page(prefix, gap.lifetime, at, kv.pages[gap.lifetime][at])
            for gap in gaps
            for at in range(gap.first, min(gap.end, len(prefix)))
        ]
        if not pages:
            return
        on_end = partial(self._on_loaded, sequence, kv)
        num_fetched = tiers.load(prefix, pages, on_end, is_layerwise=is_layerwise)
        num_loaded = len({page.depth for page in pages})
        cached = CachedTokens(
            total=len(prefix) * self._page_size,
            host=(num_loaded - num_fetched) * self._page_size,
            storage=num_fetched * self._page_size,
        )
        kv.load = PageLoad(is_layerwise, cached)
        if is_layerwise:
            self._continue_after(kv, cached)

    def note_sampled(self, sequence: TokenSequence) -> None:
        """End the sequence's layerwise load, if any. A token was sampled, so every rank has read the loaded pages."""
        assert not sequence.waits_for_load, f"room {sequence.room}: computed before its pages were loaded"
        if sequence.kv.load is not None:
            sequence.kv.load = None
            self.put_into_cache(sequence)

    def grow(self, sequence: TokenSequence, count: int, in_step: Collection[Room] = ()) -> bool:
        """Allocate pages for more tokens. If necessary, preempt this sequence or others that are not ``in_step``."""
        kv = sequence.kv
        needed = pages_for(kv.num_planned_tokens + count, self._page_size) - kv.num_pages
        if needed <= 0:
            return True
        demands = [(needed, sequence.owner_base + kv.num_pages)] * len(kv.pages)
        while not self._allocator.can_allocate(demands):
            victim = self._victim(sequence, in_step)
            if victim is sequence and kv.num_pending_samples:
                return False  # preempted now, it would lose the token that a step under way samples
            if not victim.is_loading:
                self._preempt(victim)
            if victim is sequence:
                return False
        for pages, new in zip(kv.pages, self._allocator.allocate(demands), strict=True):
            pages += new
        return True

    def _victim(self, sequence: TokenSequence, in_step: Collection[Room]) -> TokenSequence:
        """Return the sequence to preempt if this one needs a page.

        The oldest of the most urgent sequences is only preempted for itself, so some sequence always makes progress.
        """
        running = self.running.values()
        held, oldest = Shares.of_pages(running), min(running, key=urgency)
        others = (other for other in running if not other.is_loading and other.room not in in_step)
        return max(
            (sequence, *others),
            key=lambda other: (other is not oldest, other.priority, held.used(other.tenant), other.arrival_number),
        )

    def preempt_above(
        self, share: float, held: Shares, num_wanted: int, num_reserved_for: Callable[[TokenSequence], int]
    ) -> bool:
        """Preempt the latest sequences of tenants that hold more than ``share`` pages per weight, if that frees enough.
        Return whether it does.

        The oldest of the most urgent sequences always makes progress, as in ``_victim``.

        Args:
            held: pages that each tenant holds, also in sequences that do not run. Those preempted are deducted.
            num_reserved_for: returns the number of pages reserved for a running sequence, which become free with it.
        """
        running = self.running.values()
        oldest = min(running, key=urgency, default=None)
        uses = Counter(page for sequence in running for page in live_pages(sequence.kv.pages))
        others = [other for other in running if other is not oldest and not other.is_loading]
        others.sort(key=lambda other: (-other.priority, -held.used(other.tenant), -other.arrival_number))
        chosen = list[TokenSequence]()
        for other in others:
            if num_wanted > 0 and held.used(other.tenant) > share:
                chosen.append(other)
                held.charge(other, -other.kv.num_pages)
                uses.subtract(pages := live_pages(other.kv.pages))
                num_wanted -= sum(not uses[page] for page in pages) + num_reserved_for(other)
        for other in chosen if num_wanted <= 0 else ():
            self._preempt(other)
        return num_wanted <= 0

    def put_into_cache(self, sequence: TokenSequence) -> None:
        """Cache complete pages, unless a load may still write to them."""
        if sequence.is_loading:
            return
        kv, keys = sequence.kv, self.keys(sequence, sequence.kv.num_computed_tokens)
        kv.num_shared_pages = self._allocator.put_into_cache(kv.pages, keys, kv.num_shared_pages)

    def free_unseen(self, sequence: TokenSequence) -> None:
        """Free the pages that no token after the last full page can see, unless a load may still write to them."""
        kv = sequence.kv
        if len(kv.pages) == 1 or sequence.is_loading:
            return
        num_full = kv.num_computed_tokens // self._page_size * self._page_size
        for pages, end in zip(kv.pages, self._allocator.lifetimes.first_pages(num_full), strict=True):
            start = end
            while start and pages[start - 1] != NO_PAGE:
                start -= 1
            self._allocator.free(pages[start:end])
            pages[start:end] = [NO_PAGE] * (end - start)

    @property
    def awaits_loads(self) -> bool:
        """Return whether pages of removed sequences become free once they are loaded."""
        return bool(self._leaving)

    def take_layerwise_load(self) -> TierJob | None:
        """Return the job that loads cached pages from host memory layer by layer during the next step, if any."""
        return self._tiers.jobs.take_layerwise() if self._tiers else None

    def take_releases(self) -> list[Room]:
        releases, self._releases = self._releases, []
        return releases

    def prefix_len(self, sequence: TokenSequence) -> int:
        """Return the number of leading tokens that are computed, planned or cached."""
        if sequence.kv.pages:
            return sequence.kv.num_planned_tokens
        return self._allocator.count_cached(self._prefix_keys(sequence)) * self._page_size

    def next_key(self, sequence: TokenSequence) -> bytes | None:
        """Return the key of the first page that a waiting sequence would compute. None if that page is not full."""
        keys = self._prefix_keys(sequence)
        num_cached = self._allocator.count_cached(keys)
        return keys[num_cached] if num_cached < len(keys) else None

    def keys(self, sequence: TokenSequence, num_tokens: int) -> list[bytes]:
        """Return the keys of the full pages among the first tokens. Empty if caching is disabled."""
        return sequence.keys_of(num_tokens, self._page_size) if self._allocator.is_caching else []

    @property
    def all_pages(self) -> list[int]:
        states = [sequence.kv for sequence in self.running.values()] + [kv for _, kv in self._leaving]
        return [page for kv in states for page in live_pages(kv.pages)]

    def check_integrity(self) -> None:
        """Assert that every running sequence has the pages for its KV, and that no waiting sequence has pages."""
        for sequence in self.running.values():
            kv = sequence.kv
            assert kv.num_pages >= pages_for(kv.num_computed_tokens, self._page_size), sequence.room
        assert not any(sequence.kv.pages for sequence in self.waiting)

    def _count_overtaking(self, sequence: TokenSequence, oldest: TokenSequence) -> int:
        """Return how many of the oldest waiting sequence's pages this one would take. Zero if both fit now, or will fit
        once all sequences have ended that are older than the oldest waiting one and did not overtake it.
        """
        reserved = self._all_demands(oldest)
        if sequence is oldest or self._allocator.can_allocate([*self._all_demands(sequence), *reserved]):
            return 0
        cached = self._find_cached(sequence)
        later = [
            other
            for other in self.running.values()
            if other.arrival_number > oldest.arrival_number or self.waiting.has_overtaken(other)
        ]
        taken = set(live_pages(cached)).union(*(live_pages(other.kv.pages) for other in later))
        demands = [*_demands(sequence, self._gaps(sequence, cached)), *reserved]
        return 0 if self._allocator.would_fit(demands, taken) else self._pages_of(sequence)

    def _continue_after(self, kv: KvState, cached: CachedTokens) -> None:
        kv.cached = cached
        kv.num_computed_tokens = kv.num_planned_tokens = cached.total

    def _on_loaded(self, sequence: TokenSequence, kv: KvState, is_done: bool) -> None:
        load, kv.load = kv.load, None
        if load is None:
            return  # a token was sampled before every rank had reported
        if is_done and not load.is_layerwise:
            self._continue_after(kv, load.cached)
        if (sequence, kv) in self._leaving:
            self._leaving.remove((sequence, kv))
            self._leave_to_cache(sequence, kv)
        elif is_done or load.is_layerwise:
            self.put_into_cache(sequence)
        else:
            sequence.uses_host = False
            self._wait_again(sequence)

    def _preempt(self, sequence: TokenSequence) -> None:
        assert sequence.destination is None, f"room {sequence.room}: preempted while its KV is being sent"
        self._wait_again(sequence)
        self.num_preemptions += 1

    def _wait_again(self, sequence: TokenSequence) -> None:
        del self.running[sequence.room]
        kv, sequence.kv = sequence.kv, KvState()
        self._leave_to_cache(sequence, kv)
        self.waiting.add(sequence)

    def _leave_to_cache(self, sequence: TokenSequence, kv: KvState) -> None:
        self._release(sequence, kv)
        self._allocator.keep(kv.pages, self.keys(sequence, kv.num_computed_tokens))

    def _release(self, sequence: TokenSequence, kv: KvState) -> None:
        if kv.announced_step:
            self._releases.append(sequence.room)

    def _pages_of(self, sequence: TokenSequence) -> int:
        return pages_for(len(sequence.tokens), self._page_size) * self._allocator.lifetimes.num

    def _all_demands(self, sequence: TokenSequence) -> list[Demand]:
        return [(pages_for(len(sequence.tokens), self._page_size), sequence.owner_base)] * self._allocator.lifetimes.num

    def _gaps(self, sequence: TokenSequence, cached: PageLists) -> list[Gap]:
        """Return the pages that a sequence lacks after the cached ones. It gets all of them before its first step."""
        return self._allocator.lifetimes.gaps(cached, pages_for(len(sequence.tokens), self._page_size))

    def _find_cached(self, sequence: TokenSequence) -> PageLists:
        """Return the cached pages after which a sequence starts, with ``NO_PAGE`` for pages in host memory."""
        keys = self._prefix_keys(sequence)
        if self._tiers and sequence.uses_host:
            return self._allocator.find(keys, self._tiers.host.has)
        return self._allocator.find(keys)

    def _prefix_keys(self, sequence: TokenSequence) -> list[bytes]:
        """Return the keys of pages that the cache may have. The last token is always computed, for its logits."""
        return self.keys(sequence, len(sequence.tokens) - 1)


def _demands(sequence: TokenSequence, gaps: list[Gap]) -> list[Demand]:
    return [(gap.end - gap.first, sequence.owner_base + gap.first) for gap in gaps]
