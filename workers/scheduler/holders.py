"""Which sequences hold pages and which wait for them. Sans I/O.

A waiting sequence starts behind the cached pages of its prefix when pages for the rest are free, grows a page at a
time, and gives its pages back when the pool runs dry, the least urgent first and of those the last to come; what the
cache does not keep of its KV is then computed again from its tokens, with no effect on its output.
"""

from functools import partial

from cluster.spec.ids import Room
from cluster.spec.kv import pages_for
from cluster.spec.tiers import TierJob
from workers.cache.page_allocator import PageAllocator
from workers.hicache.policy.loader import Loaded
from workers.hicache.tiers import Tiers
from workers.scheduler.sequence import PageLoad, Sequence
from workers.scheduler.waiting import Waiting, urgency


class PageHolders:
    """All sequences of one step scheduler: those with pages run, the others wait."""

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        tiers: Tiers | None = None,
    ) -> None:
        self._allocator = allocator
        self._tiers = tiers
        self._page_size = page_size
        self._num_arrivals = 0
        self._releases: list[Room] = []
        self.waiting = Waiting[Sequence]()
        self.running: dict[Room, Sequence] = {}
        self._num_left = 0
        """Running sequences that are no more, whose pages the caller may hold still."""
        self._leaving: list[Sequence] = []
        """Forgotten while pages were loaded: these may still be written to."""
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Take in a sequence, which runs if it brings pages."""
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        if not sequence.pages:
            self.waiting.add(sequence)
            return
        assert len(sequence.pages) >= pages_for(sequence.computed_len, self._page_size)
        self.running[sequence.room] = sequence
        self.share(sequence)

    def remove(self, room: Room) -> list[int]:
        """Forget a sequence; the pages it held now belong to the caller, unless nothing is computed behind them yet.

        While copies to them are on their way they are held here too.
        """
        sequence = self.running.pop(room, None)
        if sequence is None:
            self.waiting.remove(room)
            return []
        self._num_left += 1
        if sequence.load is None:
            return self._withdraw(sequence)
        self._leaving.append(sequence)
        pages = sequence.pages if sequence.load.joins else []
        return self._allocator.allocate(len(pages), pages, sequence.owner_base)

    def retire(self, room: Room) -> None:
        """Forget a sequence and leave what was computed of it to the cache."""
        sequence = self.running.pop(room, None)
        if sequence is None:
            self.waiting.remove(room)
            return
        self._num_left += 1
        if sequence.is_loading:
            self._leaving.append(sequence)
        else:
            self._leave_to_cache(sequence)

    def whole_pages(self, room: Room) -> list[int]:
        """The pages of a sequence whose KV is whole; none of one that waits or is not known."""
        known = self.running.get(room)
        return known.pages[: known.computed_len // self._page_size] if known is not None else []

    def can_start(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence can have its pages, and they are not kept for the oldest waiting one."""
        needed, oldest = self._pages_of(sequence), self.waiting.oldest
        assert oldest is not None, f"room {sequence.room} does not wait"
        num_gains = self._allocator.num_gains + self._num_left
        if self.waiting.is_in_vain(sequence, num_gains):
            return False
        if self._tiers and (key := self.next_key(sequence)) is not None and self._tiers.loader.is_loading(key):
            return False
        allocator, base = self._allocator, sequence.owner_base
        can_start = self.waiting.may_pass(self._count_passing(sequence, oldest), self._pages_of(oldest)) and (
            allocator.can_allocate(needed, (), base)
            or allocator.can_allocate(needed, self._find_cached(sequence), base)
        )
        if not can_start:
            self.waiting.note_in_vain(sequence)
        return can_start

    def start(self, sequence: Sequence, *, is_alone: bool = False) -> bool:
        """Give a waiting sequence its pages, if it can have them; false too where they are to be loaded first.

        Nobody else is held up by one that is alone in the next step: that one is begun while they come.
        """
        if not self.can_start(sequence):
            return False
        assert self.waiting.oldest is not None
        self.waiting.note_passed(self._count_passing(sequence, self.waiting.oldest))
        self.waiting.remove(sequence.room)
        cached = self._find_cached(sequence)
        sequence.pages = self._allocator.allocate(self._pages_of(sequence), cached, sequence.owner_base)
        sequence.computed_len = sequence.planned_len = sequence.cached_len = len(cached) * self._page_size
        sequence.host_len = sequence.storage_len = 0
        self.running[sequence.room] = sequence
        if self._tiers:
            keys = self._prefix_keys(sequence)
            self._tiers.note_hits(keys[: len(cached)])
            load = PageLoad(joins=is_alone and self._tiers.can_load_layerwise)
            on_end = partial(self._on_loaded, sequence, load)
            coming = self._tiers.loader.load(keys, sequence.pages, len(cached), on_end, layerwise=load.joins)
            sequence.load = load if coming.num_pages else None
            if load.joins:
                self._go_behind(sequence, coming)
        return not sequence.waits_for_pages

    def note_drawn(self, sequence: Sequence) -> None:
        """A token was drawn behind all pages of a sequence: whichever rank has a part in that has read them."""
        assert not sequence.waits_for_pages, f"room {sequence.room} is computed without its pages"
        if sequence.load is not None:
            sequence.load = None
            self.share(sequence)

    def grow(self, sequence: Sequence, count: int) -> bool:
        """Make room for more tokens; preempts others, or this one, if it must.

        Nobody is preempted for one that is less urgent or came later, so that somebody always gets on.
        """
        if sequence.planned_len + count <= len(sequence.pages) * self._page_size:
            return True
        needed = pages_for(sequence.planned_len + count, self._page_size) - len(sequence.pages)
        next_owner = sequence.owner_base + len(sequence.pages)
        running = self.running.values()
        while needed > 0 and not self._allocator.can_allocate(needed, (), next_owner):
            last = max((other for other in running if other is sequence or not other.is_loading), key=urgency)
            if not last.is_loading:
                self._preempt(last)
            if last is sequence:
                return False
        if needed > 0:
            sequence.pages += self._allocator.allocate(needed, (), next_owner)
        return True

    def share(self, sequence: Sequence) -> None:
        """Let others read the pages that are whole, unless copies to them may still be on their way."""
        if sequence.is_loading:
            return
        keys = self.keys(sequence, sequence.computed_len)
        sequence.num_shared_pages = self._allocator.share(sequence.pages, keys, sequence.num_shared_pages)

    def take_fill(self) -> TierJob | None:
        """What the next step reads of host memory while it is computed, if anything."""
        return self._tiers.take_layerwise() if self._tiers else None

    def take_releases(self) -> list[Room]:
        """Rooms that the ranks know and should forget, since the last call."""
        releases, self._releases = self._releases, []
        return releases

    def prefix_len(self, sequence: Sequence) -> int:
        """Leading tokens that need not be computed if the sequence has its turn now."""
        if sequence.pages:
            return sequence.planned_len
        return self._allocator.count_cached(self._prefix_keys(sequence)) * self._page_size

    def next_key(self, sequence: Sequence) -> bytes | None:
        """Key of the first page that a waiting sequence would compute; None for a page that nobody could share."""
        keys = self._prefix_keys(sequence)
        num_cached = self._allocator.count_cached(keys)
        return keys[num_cached] if num_cached < len(keys) else None

    def keys(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Keys of the full pages among the first tokens; hashed only where somebody will look for them."""
        return sequence.keys_of(num_tokens, self._page_size) if self._allocator.is_caching else []

    @property
    def held_pages(self) -> list[int]:
        """Pages of all sequences."""
        return [page for sequence in (*self.running.values(), *self._leaving) for page in sequence.pages]

    def check_integrity(self) -> None:
        """Prove that every running sequence has the pages its KV needs, and no waiting one has any."""
        for sequence in self.running.values():
            assert len(sequence.pages) >= pages_for(sequence.computed_len, self._page_size), sequence.room
        assert not any(sequence.pages for sequence in self.waiting)

    def _count_passing(self, sequence: Sequence, oldest: Sequence) -> int:
        """Pages that the oldest waiting sequence might have to wait for if this one took them.

        None when both fit now, or will once those that are older than the oldest waiting one have ended.
        """
        needed, reserved = self._pages_of(sequence), (self._pages_of(oldest), oldest.owner_base)
        if sequence is oldest or self._allocator.can_allocate_all([(needed, sequence.owner_base), reserved]):
            return 0
        cached = self._find_cached(sequence)
        younger = [other for other in self.running.values() if other.arrival > oldest.arrival]
        taken = set(cached).union(*(other.pages for other in younger))
        rest = (needed - len(cached), sequence.owner_base + len(cached))
        return 0 if self._allocator.would_fit([rest, reserved], beside=taken) else needed

    def _go_behind(self, sequence: Sequence, loaded: Loaded) -> None:
        """Go on behind the pages that are loaded; what does not come is computed."""
        sequence.storage_len = loaded.num_fetched * self._page_size
        sequence.host_len = loaded.num_pages * self._page_size - sequence.storage_len
        sequence.cached_len += loaded.num_pages * self._page_size
        sequence.computed_len = sequence.planned_len = sequence.cached_len

    def _on_loaded(self, sequence: Sequence, load: PageLoad, loaded: Loaded) -> None:
        if sequence.load is not load:
            return  # a token was drawn before every rank had told
        sequence.load = None
        if not load.joins:
            self._go_behind(sequence, loaded)
        if sequence in self._leaving:
            self._leaving.remove(sequence)
            self._leave_to_cache(sequence)
        else:
            self.share(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.target is None, f"room {sequence.room} is being sent and cannot be preempted"
        del self.running[sequence.room]
        self._leave_to_cache(sequence)
        self.waiting.add(sequence)
        self.num_preemptions += 1

    def _leave_to_cache(self, sequence: Sequence) -> None:
        keys = self.keys(sequence, sequence.computed_len)
        self._allocator.keep(self._withdraw(sequence), keys)

    def _withdraw(self, sequence: Sequence) -> list[int]:
        pages, sequence.pages = sequence.pages, []
        if sequence.told_step:
            self._releases.append(sequence.room)
        sequence.told_step = sequence.num_coming = 0
        sequence.num_announced_pages = sequence.num_shared_pages = 0
        sequence.computed_len = sequence.planned_len = 0
        return pages

    def _pages_of(self, sequence: Sequence) -> int:
        return pages_for(len(sequence.tokens), self._page_size)

    def _find_cached(self, sequence: Sequence) -> list[int]:
        return self._allocator.find(self._prefix_keys(sequence))

    def _prefix_keys(self, sequence: Sequence) -> list[bytes]:
        """Of the pages that may come from the cache; the last token is always computed, for its logits."""
        return self.keys(sequence, len(sequence.tokens) - 1)
