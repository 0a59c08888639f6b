"""Which tokens are computed in which step: continuous batching over one page pool. Sans I/O; serves both roles.

A waiting sequence starts behind the cached pages of its prefix when pages for the rest are free, grows a page at a
time, and gives its pages back (newest first) when the pool runs dry; it is then computed again from its tokens, with no
effect on its output.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.spec.ids import Room
from cluster.spec.kv import pages_for
from cluster.spec.messages import Admit, Row, StepPlan
from workers.cache.page_allocator import PageAllocator
from workers.context_parallel.cost_model import Choose
from workers.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may hold."""

    page_size: int
    chunk_tokens: int
    max_requests: int


class StepScheduler:
    """Turns sequences into step plans, and sampled tokens into longer sequences."""

    def __init__(self, allocator: PageAllocator, limits: StepLimits, choose: Choose) -> None:
        self._allocator = allocator
        self._limits = limits
        self._choose = choose
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._releases: list[Room] = []
        self._step = 0
        self.num_retractions = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no pages."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return len(self._running)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(sequence.tokens) for sequence in (*self._running, *self._waiting))

    @property
    def held_pages(self) -> list[int]:
        """Pages of the running sequences."""
        return [page for sequence in self._running for page in sequence.pages]

    def has_work(self) -> bool:
        """Whether the next plan would hold anything; a release alone can wait."""
        return bool(self._running) or self._can_start()

    def add(self, sequence: Sequence) -> None:
        """Take a sequence without pages; it starts when its turn and its pages come."""
        assert not sequence.pages, f"room {sequence.room} brings pages but is to wait"
        self._waiting.append(sequence)

    def add_running(self, sequence: Sequence) -> None:
        """Take a sequence whose KV is already in its pages."""
        assert len(sequence.pages) >= pages_for(sequence.computed_len, self._limits.page_size)
        self._running.append(sequence)
        self._share(sequence)

    def remove(self, room: Room) -> list[int]:
        """Forget a sequence; the pages it held now belong to the caller."""
        for sequence in self._running:
            if sequence.room == room:
                self._running.remove(sequence)
                return self._withdraw(sequence)
        self._waiting = deque(sequence for sequence in self._waiting if sequence.room != room)
        return []

    def retire(self, room: Room) -> None:
        """Forget a sequence and leave what was computed of it to the cache."""
        for sequence in self._running:
            if sequence.room == room:
                self._running.remove(sequence)
                self._leave_to_cache(sequence)
                return
        self.remove(room)

    def next_plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute."""
        rows: list[Row] = []
        admits: list[Admit] = []
        budget = self._limits.chunk_tokens
        for sequence in self._in_turn():
            if budget == 0 or len(rows) == self._limits.max_requests:
                break
            if sequence not in self._running or not self._grow(sequence, min(sequence.pending_len, budget)):
                continue
            row = self._row(sequence, budget, admits)
            rows.append(row)
            budget -= len(row.token_ids)
        while budget and len(rows) < self._limits.max_requests and self._can_start():
            row = self._row(self._start(), budget, admits)
            rows.append(row)
            budget -= len(row.token_ids)
        if not rows:
            return None
        self._step += 1
        releases, self._releases = self._releases, []
        choice = self._choose([len(row.token_ids) for row in rows], [row.first_position for row in rows])
        return StepPlan(
            step=self._step,
            strategy=choice.strategy,
            admits=admits,
            rows=rows,
            releases=releases,
            estimate_s=choice.estimate_s,
            passing=choice.passing,
        )

    def commit(self, plan: StepPlan, sampled: Mapping[Room, int]) -> list[Sequence]:
        """Book the outcome of a step; the sequences that got a token, in row order.

        A sequence removed while the step ran is passed over.
        """
        by_room = {sequence.room: sequence for sequence in self._running}
        advanced = []
        for row in plan.rows:
            sequence = by_room.get(row.room)
            if sequence is None:
                continue
            sequence.computed_len += len(row.token_ids)
            if sequence.computed_len // self._limits.page_size > row.first_position // self._limits.page_size:
                self._share(sequence)
            if row.samples:
                sequence.tokens.append(sampled[row.room])
                advanced.append(sequence)
        return advanced

    def check_integrity(self) -> None:
        """Prove that every running sequence has the pages its KV needs, and no waiting one has any."""
        for sequence in self._running:
            assert len(sequence.pages) >= pages_for(sequence.computed_len, self._limits.page_size), sequence.room
        assert not any(sequence.pages for sequence in self._waiting)

    def _in_turn(self) -> list[Sequence]:
        """Sequences that wait for one token first: they are streams somebody watches."""
        return sorted(self._running, key=lambda sequence: sequence.pending_len > 1)

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Make room for more tokens; retracts the newest sequences if it must, this one last."""
        needed = pages_for(sequence.computed_len + count, self._limits.page_size) - len(sequence.pages)
        next_owner = sequence.owner_base + len(sequence.pages)
        while needed > 0 and not self._allocator.can_allocate(needed, first_owner=next_owner):
            newest = self._running[-1]
            self._retract(newest)
            if newest is sequence:
                return False
        if needed > 0:
            sequence.pages += self._allocator.allocate(needed, first_owner=next_owner)
        return True

    def _retract(self, sequence: Sequence) -> None:
        assert sequence.target is None, f"room {sequence.room} is being sent and cannot be retracted"
        self._running.remove(sequence)
        self._leave_to_cache(sequence)
        self._waiting.appendleft(sequence)
        self.num_retractions += 1

    def _share(self, sequence: Sequence) -> None:
        keys = sequence.keys_of(sequence.computed_len, self._limits.page_size)
        self._allocator.share(sequence.pages, keys)

    def _leave_to_cache(self, sequence: Sequence) -> None:
        keys = sequence.keys_of(sequence.computed_len, self._limits.page_size)
        self._allocator.keep(self._withdraw(sequence), keys)

    def _withdraw(self, sequence: Sequence) -> list[int]:
        pages, sequence.pages = sequence.pages, []
        if sequence.announced:
            self._releases.append(sequence.room)
        sequence.announced = False
        sequence.num_announced_pages = 0
        sequence.computed_len = 0
        return pages

    def _can_start(self) -> bool:
        if not self._waiting:
            return False
        first = self._waiting[0]
        needed = pages_for(len(first.tokens), self._limits.page_size)
        return self._allocator.can_allocate(needed, (), first.owner_base) or self._allocator.can_allocate(
            needed, self._find_cached(first), first.owner_base
        )

    def _start(self) -> Sequence:
        sequence = self._waiting.popleft()
        cached = self._find_cached(sequence)
        needed = pages_for(len(sequence.tokens), self._limits.page_size)
        sequence.pages = self._allocator.allocate(needed, cached, sequence.owner_base)
        sequence.computed_len = sequence.cached_len = len(cached) * self._limits.page_size
        self._running.append(sequence)
        return sequence

    def _find_cached(self, sequence: Sequence) -> list[int]:
        """Cached pages of the sequence's prefix; the last token is always computed, for its logits."""
        return self._allocator.find(sequence.keys_of(len(sequence.tokens) - 1, self._limits.page_size))

    def _row(self, sequence: Sequence, budget: int, admits: list[Admit]) -> Row:
        if not sequence.announced:
            admits.append(_admit(sequence))
            sequence.announced = True
        start = sequence.computed_len
        token_ids = sequence.tokens[start : start + budget]
        new_pages = sequence.pages[sequence.num_announced_pages :]
        sequence.num_announced_pages = len(sequence.pages)
        return Row(
            room=sequence.room,
            first_position=start,
            token_ids=token_ids,
            new_pages=new_pages,
            samples=start + len(token_ids) == len(sequence.tokens),
            output_position=sequence.num_outputs,
        )


def _admit(sequence: Sequence) -> Admit:
    return Admit(
        room=sequence.room,
        prompt_len=sequence.prompt_len,
        owner_base=sequence.owner_base,
        sampling=sequence.sampling,
        target=sequence.target,
    )
