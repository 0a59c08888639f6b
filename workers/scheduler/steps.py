"""Which tokens are computed in which step: continuous batching over one page pool. Sans I/O; serves both roles.

``holders`` knows who has pages, ``turns`` whose turn it is; here they become step plans.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cluster.spec.ids import Room
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import Admit, Row, StepPlan
from workers.cache.page_allocator import PageAllocator
from workers.context_parallel.cost_model import Choose
from workers.hicache.tiers import Tiers
from workers.scheduler.holders import PageHolders
from workers.scheduler.sequence import Sequence
from workers.scheduler.turns import Budget, Chunk, Turn, turn
from workers.scheduler.waiting import urgency

_UNKNOWN = 0
"""Stands for a token that has yet to be drawn."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may hold."""

    page_size: int
    chunk_tokens: int
    max_requests: int
    oldest_share: float = 0.25
    """Part of a step's time that belongs to the oldest sequence."""
    depth: int = 1
    """Most steps under way at once, for pipeline stages that each compute another."""
    most_seen: int | None = None
    """Most tokens with what is before them, where ranks pass all of that on: so a step takes no more memory for it than
    one long prompt."""
    runs_ahead: bool = False
    """A step may follow tokens that the one before, which is under way, has yet to draw; ``depth`` is 2 then."""


class StepScheduler:
    """Turns sequences into step plans, and sampled tokens into longer sequences."""

    def __init__(
        self,
        allocator: PageAllocator,
        limits: StepLimits,
        choose: Choose,
        chunk: Chunk | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        """Without ``chunk``, a token takes the same time whatever its prefix."""
        self._holders = PageHolders(allocator, limits.page_size, tiers)
        self._limits = limits
        self._choose = choose
        self._chunk = chunk or (lambda _prefix_len: limits.chunk_tokens)
        self.num_under_way = 0
        """Plans that were not committed yet."""
        self._step = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no pages."""
        return len(self._holders.waiting)

    def is_waiting(self, room: Room) -> bool:
        """Whether a sequence is here and holds no pages."""
        return room in self._holders.waiting

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return len(self._holders.running)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(sequence.tokens) for sequence in (*self._holders.running.values(), *self._holders.waiting))

    @property
    def num_preemptions(self) -> int:
        """How often a sequence had to give its pages back."""
        return self._holders.num_preemptions

    @property
    def held_pages(self) -> list[int]:
        """Pages of all sequences."""
        return self._holders.held_pages

    def whole_pages(self, room: Room) -> list[int]:
        """The pages of a sequence whose KV is whole; none of one that waits or is not known."""
        return self._holders.whole_pages(room)

    def has_work(self) -> bool:
        """Whether the next plan would hold anything; a release alone can wait."""
        holders = self._holders
        if self.num_under_way == self._limits.depth:
            return False
        running = holders.running.values()
        has_pending = any(sequence.pending_len and not sequence.waits_for_pages for sequence in running)
        return has_pending or any(map(holders.can_start, holders.waiting.candidates()))

    def add(self, sequence: Sequence) -> None:
        """Take a sequence without pages; it starts when its turn and its pages come."""
        assert not sequence.pages, f"room {sequence.room} brings pages but is to wait"
        sequence.first_step = self._step
        self._holders.add(sequence)

    def add_running(self, sequence: Sequence) -> None:
        """Take a sequence whose KV is already in its pages."""
        assert sequence.pages, f"room {sequence.room} is to run and brings no pages"
        self._holders.add(sequence)

    def remove(self, room: Room) -> list[int]:
        """Forget a sequence; the pages it held now belong to the caller."""
        return self._holders.remove(room)

    def retire(self, room: Room) -> None:
        """Forget a sequence and leave what was computed of it to the cache."""
        self._holders.retire(room)

    def next_plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute; the caller commits plans in order."""
        if self.num_under_way == self._limits.depth:
            return None
        granted = self._grant()
        if not granted:
            return None
        self._step += 1
        self.num_under_way += 1
        admits: list[Admit] = []
        rows = [self._row(self._holders.running[room], count, admits) for room, count in granted.items()]
        if self._runs_ahead:
            for row in rows:
                self._holders.running[row.room].num_coming += row.samples
        choice = self._choose([len(row.token_ids) for row in rows], [row.first_position for row in rows])
        return StepPlan(
            step=self._step,
            strategy=choice.strategy,
            admits=admits,
            rows=rows,
            releases=self._holders.take_releases(),
            estimate_s=choice.estimate_s,
            passing=choice.passing,
            fill=self._holders.take_fill(),
        )

    def commit(self, plan: StepPlan, sampled: Mapping[Room, Sampled]) -> list[Sequence]:
        """Book the outcome of a step; the sequences that got a token, in row order.

        A sequence removed or started anew while the step ran is passed over.
        """
        self.num_under_way -= 1
        advanced = []
        for row in plan.rows:
            sequence = self._holders.running.get(row.room)
            if sequence is None or not 0 < sequence.told_step <= plan.step:
                continue
            sequence.computed_len += len(row.token_ids)
            if row.samples:
                self._holders.note_drawn(sequence)
            if sequence.computed_len // self._limits.page_size > row.first_position // self._limits.page_size:
                self._holders.share(sequence)
            if row.samples:
                drawn = sampled[row.room]
                sequence.tokens.append(drawn.token_id)
                sequence.is_whole = drawn.is_last
                sequence.num_coming = max(0, sequence.num_coming - 1)
                advanced.append(sequence)
        return advanced

    def check_integrity(self) -> None:
        """Prove that every running sequence has the pages its KV needs, and no waiting one has any."""
        self._holders.check_integrity()

    def _grant(self) -> dict[Room, int]:
        """Give the tokens of the next step away: to streams, to the oldest sequences, and then by rank.

        Who would compute a page that somebody computes in this very step waits, to find it in the cache, and
        gives its turn to that one.
        """
        holders = self._holders
        limits = self._limits
        budget = Budget(limits.chunk_tokens, limits.max_requests, self._chunk, limits.most_seen)
        self._grant_streams(budget)
        pending = [
            sequence
            for sequence in holders.running.values()
            if sequence.room not in budget.granted and sequence.pending_len and not sequence.is_stream
        ]
        able = [sequence for sequence in pending + holders.waiting.candidates() if not sequence.waits_for_pages]
        is_alone = len(able) == 1 and all(other is able[0] for other in holders.running.values())
        turns = {sequence.room: self._turn(sequence) for sequence in able}
        coming = {
            key: sequence
            for sequence in (holders.running.values() if self.num_under_way else ())
            for key in self._keys_under_way(sequence, sequence.planned_len)
        }
        for oldest, share in self._start_oldest(able, turns, budget, is_alone=is_alone):
            budget.grant_share(oldest.room, oldest.planned_len, oldest.pending_len, share)
            coming |= dict.fromkeys(self._keys_of_row(oldest, budget), oldest)
        for sequence in sorted(able, key=lambda sequence: turns[sequence.room].rank):
            if sequence.waits_for_pages or not budget.is_open(sequence.room):
                continue
            computes = self._who_computes(sequence, coming, is_alone=is_alone)
            if computes is not None:
                budget.grant(computes.room, computes.planned_len, computes.pending_len)
                coming |= dict.fromkeys(self._keys_of_row(computes, budget), computes)
        return budget.granted

    def _start_oldest(
        self, able: list[Sequence], turns: Mapping[Room, Turn], budget: Budget, *, is_alone: bool
    ) -> Iterator[tuple[Sequence, float]]:
        """Of those of like length the oldest that has its pages or can have them, each with its share of the step."""
        share = self._oldest_share
        oldest_first = sorted(able if share else (), key=lambda sequence: sequence.arrival)
        lengths = dict.fromkeys(turns[sequence.room].length for sequence in oldest_first)
        for length in lengths:
            for sequence in oldest_first:
                if turns[sequence.room].length != length or not budget.is_open(sequence.room):
                    continue
                if sequence.pages or self._holders.start(sequence, is_alone=is_alone):
                    yield sequence, share / len(lengths)
                    break

    @property
    def _oldest_share(self) -> float:
        """Of this step. Prompts may have no room beside each other: so the oldest have more in every other step."""
        share = self._limits.oldest_share
        if self._limits.most_seen is None:
            return share
        return max(2 * share - 1, 0.0) if self._step % 2 else min(2 * share, 1.0)

    def _who_computes(self, sequence: Sequence, coming: Mapping[bytes, Sequence], *, is_alone: bool) -> Sequence | None:
        """Who gets the tokens of a sequence's turn; nobody if it lacks pages."""
        if sequence.pages:
            return sequence
        key = self._holders.next_key(sequence)
        if key is not None and key in coming:
            return coming[key]
        return sequence if self._holders.start(sequence, is_alone=is_alone) else None

    def _grant_streams(self, budget: Budget) -> None:
        """One token for every sequence that waits for no more; to make room for it others may be preempted.

        None that has its token already is: in this order everybody comes before those that may go for it.
        Where several steps are under way at once, each has its part of the sequences.
        """
        running = self._holders.running.values()
        streams = sorted((sequence for sequence in running if sequence.is_stream), key=urgency)
        if self._limits.depth > 1 and not self._limits.runs_ahead:
            num_streams = -(-sum(sequence.num_outputs > 0 for sequence in running) // self._limits.depth)
            streams = streams[:num_streams]
        for sequence in streams:
            # Whoever was preempted meanwhile has no pages.
            if budget.is_open(sequence.room) and sequence.pages and self._holders.grow(sequence, 1):
                budget.grant_stream(sequence.room, sequence.planned_len)

    def _turn(self, sequence: Sequence) -> Turn:
        prefix_len = self._holders.prefix_len(sequence)
        return turn(
            priority=sequence.priority,
            arrival=sequence.arrival,
            prefix_len=prefix_len,
            pending_len=len(sequence.tokens) - prefix_len,
            chunk_tokens=min(self._chunk(prefix_len), self._limits.chunk_tokens),
            age_steps=self._step - sequence.first_step,
        )

    @property
    def _runs_ahead(self) -> bool:
        """Where a draw depends on the tokens before it, these must be known; then all wait, so that none is put off."""
        return self._limits.runs_ahead and not any(
            sequence.sampling.looks_back for sequence in self._holders.running.values()
        )

    def _row(self, sequence: Sequence, count: int, admits: list[Admit]) -> Row:
        if not sequence.told_step:
            admits.append(_admit(sequence))
            sequence.told_step = self._step
        start, num_outputs = sequence.planned_len, sequence.num_outputs + sequence.num_coming
        token_ids = sequence.tokens[start : start + count]
        sequence.planned_len += count
        new_pages = sequence.pages[sequence.num_announced_pages :]
        sequence.num_announced_pages = len(sequence.pages)
        return Row(
            room=sequence.room,
            first_position=start,
            token_ids=token_ids or [_UNKNOWN],
            follows=not token_ids,
            new_pages=new_pages,
            samples=sequence.planned_len == len(sequence.tokens) + sequence.num_coming,
            output_position=num_outputs,
            targets=[] if sequence.sampling.num_prompt_logprobs is None else _targets(sequence, start, count),
        )

    def _keys_of_row(self, sequence: Sequence, budget: Budget) -> list[bytes]:
        """Keys of the pages that will be whole after this step and are not yet."""
        return self._keys_under_way(sequence, sequence.planned_len + budget.granted.get(sequence.room, 0))

    def _keys_under_way(self, sequence: Sequence, end: int) -> list[bytes]:
        """Keys of the pages before ``end`` that are not whole yet."""
        if end == sequence.computed_len:
            return []
        return self._holders.keys(sequence, end)[sequence.computed_len // self._limits.page_size :]


def _targets(sequence: Sequence, start: int, count: int) -> list[int]:
    """The tokens after these, as far as they are of the prompt; only once, not when it is computed again."""
    return [] if sequence.num_outputs > 0 else sequence.tokens[start + 1 : start + 1 + count]


def _admit(sequence: Sequence) -> Admit:
    return Admit(
        room=sequence.room,
        prompt_len=sequence.prompt_len,
        owner_base=sequence.owner_base,
        sampling=sequence.sampling,
        history=list(sequence.tokens) if sequence.sampling.looks_back else [],
        target=sequence.target,
        timed=sequence.timed,
    )
