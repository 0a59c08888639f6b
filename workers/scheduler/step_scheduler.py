"""Step scheduling by continuous batching over one page pool. Sans I/O. Serves both roles.

A plan is made in phases: streams, which decode one token each; then the oldest sequences; then the others by priority.
In each phase, tenants that compete for the step take turns. ``holders`` tracks the sequences and their pages,
``step_budget`` defines their order and the budget of a step, and ``shares`` the turns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, islice
from math import ceil

from msgspec.structs import replace

from cluster.spec.ids import Role, Room
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import StepPlan
from workers.cache.page_allocator import PageAllocator
from workers.context_parallel.chunk_sizes import ChunkLen
from workers.context_parallel.strategy_chooser import Choose
from workers.hicache.tiers import Tiers
from workers.scheduler.holders import PageHolders
from workers.scheduler.sequence import TokenSequence, new_request, schedule, urgency
from workers.scheduler.shares import Shares, Turns
from workers.scheduler.step_budget import Budget, Precedence, precedence

TURNS = 16
"""Number of turns into which a step's tokens are divided if several tenants compete for them."""
OLDEST_SHARE = 0.25
"""Share of a step's time reserved for the oldest sequences, which others can therefore delay at most fourfold."""
_FIRST_STEPS = 5
"""Maximum duration of a step, in efficient steps, soon after an arrival."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of one step."""

    page_size: int
    chunk_tokens: int
    max_requests: int
    efficient_share: float = 1.0
    """Smallest share of a full step whose fixed costs are negligible. Only the most urgent sequence may lengthen a step
    much, so that prompts do not wait for others to be complete.
    """
    depth: int = 1
    """Maximum number of steps under way. Each pipeline stage computes a different step."""
    max_context_tokens: int | None = None
    """Maximum number of tokens in a step including prefixes, which bounds memory use. None for no limit."""
    runs_ahead: bool = False
    """True if a step may use tokens that the previous step has not sampled yet. ``depth`` is then 2."""


def step_depth(role: Role, num_stages: int) -> int:
    """Return the maximum number of steps under way, without any that run ahead."""
    # Prefill has one more step than stages, so that no stage has to wait for the report of a finished step.
    return num_stages + (num_stages > 1 and role is Role.PREFILL)


_ByLength = dict[int, list[TokenSequence]]
"""Sequences by length class, oldest first."""


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Sequences, other than streams, that can be computed in the next step, in order of priority."""

    sequences: list[TokenSequence]
    precedences: Mapping[Room, Precedence]
    is_alone: bool
    """True if there is only one candidate and no other sequence runs."""
    computed_by: dict[bytes, TokenSequence]
    """Sequences by the keys of the pages that they compute in this step or in a step under way."""

    @property
    def num_tenants(self) -> int:
        return len({sequence.tenant for sequence in self.sequences})

    def by_length(self) -> _ByLength:
        groups: _ByLength = {}
        for sequence in sorted(self.sequences, key=lambda sequence: sequence.arrival_number):
            groups.setdefault(self.precedences[sequence.room].length, []).append(sequence)
        return groups


class StepScheduler:
    """Scheduler that plans steps and appends the sampled tokens to their sequences."""

    def __init__(
        self,
        allocator: PageAllocator,
        limits: StepLimits,
        choose: Choose,
        chunk: ChunkLen | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        """Create a scheduler. ``chunk`` returns how many tokens fill a step after a prefix, by default the limit."""
        self.allocator, self.tiers, self.page_size = allocator, tiers, limits.page_size
        self.holders = PageHolders(allocator, limits.page_size, tiers)
        self._limits = limits
        self._choose = choose
        self._chunk = chunk or (lambda _prefix_len: limits.chunk_tokens)
        self._shares = Shares()
        self.num_under_way = 0
        """Number of plans that have not been committed yet."""
        self._step = 0
        self._since_arrival = 0.0
        """Duration of the steps since a sequence arrived, in efficient steps."""

    @property
    def num_waiting(self) -> int:
        return len(self.holders.waiting)

    def has_work(self) -> bool:
        """Return whether the next plan would compute anything. Releases alone can wait for a later step."""
        holders = self.holders
        if self.num_under_way == self._limits.depth:
            return False
        running = holders.running.values()
        has_pending = any(sequence.num_pending_tokens and not sequence.waits_for_load for sequence in running)
        return has_pending or any(map(holders.can_start, holders.waiting.candidates()))

    def add(self, sequence: TokenSequence) -> None:
        """Add a sequence. If it has no pages, it starts when it is scheduled and its pages are free."""
        sequence.tokens = sequence.tokens or list(sequence.submit.prompt_ids)
        sequence.first_step = self._step
        self._since_arrival = 0.0
        self.holders.add(sequence)

    def next_plan(self) -> StepPlan | None:
        """Return the next step. None if there is nothing to compute. The caller must commit plans in order."""
        if self.num_under_way == self._limits.depth:
            return None
        limits = self._limits
        budget = Budget(limits.chunk_tokens, limits.max_requests, self._chunk, limits.max_context_tokens)
        self._schedule_streams(budget)
        candidates = self._find_candidates(budget)
        oldest = candidates.by_length() if self._oldest_share else {}
        share = self._step_share(candidates, oldest)
        budget.shorten(share)
        self._schedule_oldest(oldest, candidates, budget)
        self._schedule_by_priority(candidates, budget, ceil(limits.chunk_tokens * share))
        self._shares.settle()
        return self._make_plan(budget.granted) if budget.granted else None

    def commit(self, plan: StepPlan, sampled: Mapping[Room, Sampled]) -> list[TokenSequence]:
        """Apply the outcome of a step. Return the sequences that got a token, in plan order.

        Sequences that were removed or restarted during the step are skipped.
        """
        self.num_under_way -= 1
        advanced = []
        for scheduled in plan.scheduled:
            sequence = self.holders.running.get(scheduled.room)
            if sequence is None or not 0 < sequence.kv.announced_step <= plan.step:
                continue
            kv = sequence.kv
            # The caller ends a sequence whose logits are not finite. The KV behind them must not be cached.
            if not (scheduled.samples and sampled[scheduled.room].is_corrupted):
                kv.num_computed_tokens += len(scheduled.token_ids)
            if scheduled.samples:
                self.holders.note_sampled(sequence)
            if kv.num_computed_tokens // self.page_size > scheduled.first_position // self.page_size:
                self.holders.put_into_cache(sequence)
                self.holders.free_unseen(sequence)
            if scheduled.samples:
                sequence.tokens.append(sampled[scheduled.room].token_id)
                kv.num_pending_samples = max(0, kv.num_pending_samples - 1)
                advanced.append(sequence)
        return advanced

    def _schedule_streams(self, budget: Budget) -> None:
        """Grant one token to every stream. If pages run out, preempt sequences that have no token in this step yet.
        With several pipeline stages, each step computes a part of the streams.
        """
        running = self.holders.running.values()
        streams = sorted((sequence for sequence in running if sequence.is_stream), key=urgency)
        num_streams = len(streams)
        if self._limits.depth > 1 and not self._limits.runs_ahead:
            num_streams = -(-sum(sequence.num_outputs > 0 for sequence in running) // self._limits.depth)
        # Grow the oldest stream first; otherwise streams served earlier could preempt it.
        for sequence in streams[:1]:
            self.holders.grow(sequence, 1)
        for sequence in islice(Turns(streams, self._shares), num_streams):
            is_open = budget.is_open(sequence.room)
            # A stream that was preempted for another one has no pages.
            if is_open and not (sequence.kv.pages and self.holders.grow(sequence, 1, in_step=budget.granted)):
                continue
            if is_open and budget.grant_stream(sequence.room, sequence.kv.num_planned_tokens):
                self._shares.charge(sequence, 1)
            else:
                self._shares.note_unserved(sequence)

    def _find_candidates(self, budget: Budget) -> _Candidates:
        running = self.holders.running.values()
        pending = [
            sequence
            for sequence in running
            if sequence.room not in budget.granted and sequence.num_pending_tokens and not sequence.is_stream
        ]
        sequences = [
            sequence for sequence in pending + self.holders.waiting.candidates() if not sequence.waits_for_load
        ]
        is_alone = len(sequences) == 1 and all(other is sequences[0] for other in running)
        computed_by = {
            key: sequence
            for sequence in (running if self.num_under_way else ())
            for key in self._pending_keys(sequence, sequence.kv.num_planned_tokens)
        }
        precedences = {sequence.room: self._precedence(sequence) for sequence in sequences}
        sequences.sort(key=lambda sequence: precedences[sequence.room].sort_key)
        return _Candidates(sequences, precedences, is_alone, computed_by)

    def _step_share(self, candidates: _Candidates, oldest: _ByLength) -> float:
        """Return this step's length as a share of a full step: efficient, and enough for the most urgent sequence.

        Between one and two efficient steps, stop where a sequence is complete. Part of another one would delay it.

        A sequence that arrives waits for the step under way. After a recent arrival, another one is likely, so a step
        takes no longer than the steps since then. The most urgent sequence is then divided evenly, since the KV of
        all steps but its last is sent while the last one computes.
        """
        if not candidates.sequences:
            return 1.0
        work = [candidates.precedences[sequence.room].num_steps for sequence in candidates.sequences]
        num_steps = next((end for end in accumulate(work) if 1 <= end <= 2), max(1.0, work[0]))
        num_steps /= ceil(num_steps / max(_FIRST_STEPS, self._since_arrival))
        self._since_arrival += num_steps
        num_others = sum(group[0] is not candidates.sequences[0] for group in oldest.values())
        own_share = 1 - self._oldest_share * num_others / len(oldest) if oldest else 1.0
        share = self._limits.efficient_share * num_steps
        return share / own_share if share < own_share else 1.0

    def _schedule_oldest(self, oldest: _ByLength, candidates: _Candidates, budget: Budget) -> None:
        """Grant a share of the step to each length class's oldest sequence that has pages or can get them. Among
        tenants that compete, it is the oldest sequence of the one that has used least.
        """
        share = self._oldest_share
        for group in oldest.values():
            for sequence in sorted(group, key=lambda sequence: self._shares.used(sequence.tenant)):
                if not budget.is_open(sequence.room):
                    continue
                if sequence.kv.pages or self.holders.start(sequence, is_alone=candidates.is_alone):
                    num_planned, num_pending = sequence.kv.num_planned_tokens, sequence.num_pending_tokens
                    count = budget.grant_share(sequence.room, num_planned, num_pending, share / len(oldest))
                    self._shares.charge(sequence, count)
                    self._note_computing(sequence, candidates, budget)
                    break

    @property
    def _oldest_share(self) -> float:
        """Return the oldest sequences' share of this step. With a context limit, every other step has a larger one."""
        if self._limits.max_context_tokens is None:
            return OLDEST_SHARE
        return max(2 * OLDEST_SHARE - 1, 0.0) if self._step % 2 else min(2 * OLDEST_SHARE, 1.0)

    def _schedule_by_priority(self, candidates: _Candidates, budget: Budget, step_tokens: int) -> None:
        """Grant the rest of the step in order of priority, in turns of tenants. If another sequence computes a
        sequence's next page, the turn goes to that other sequence, and the page is found in the cache later.
        """
        turn_tokens = step_tokens
        if candidates.num_tenants > 1:
            turn_tokens = -(-turn_tokens // TURNS)
        turns = Turns(candidates.sequences, self._shares)
        for sequence in turns:
            if sequence.waits_for_load:
                continue
            if not budget.is_open(sequence.room):
                self._shares.note_unserved(sequence)
                continue
            chosen = self._who_computes(sequence, candidates)
            if chosen is None:
                continue
            num_pending, num_granted = chosen.num_pending_tokens, budget.granted.get(chosen.room, 0)
            wanted = min(num_pending, num_granted + turn_tokens)
            count = budget.grant(chosen.room, chosen.kv.num_planned_tokens, wanted)
            self._shares.charge(chosen, count)
            self._note_computing(chosen, candidates, budget)
            if count == turn_tokens:
                turns.repeat(sequence)
            elif num_granted + count < num_pending:
                self._shares.note_unserved(chosen)

    def _who_computes(self, sequence: TokenSequence, candidates: _Candidates) -> TokenSequence | None:
        """Return the sequence that computes this one's next page, usually itself. None if that is a stream, whose
        turn is over, or if this one cannot get pages.
        """
        if sequence.kv.pages:
            return sequence
        key = self.holders.next_key(sequence)
        if key is not None and key in candidates.computed_by:
            other = candidates.computed_by[key]
            return None if other.is_stream else other
        return sequence if self.holders.start(sequence, is_alone=candidates.is_alone) else None

    def _make_plan(self, granted: Mapping[Room, int]) -> StepPlan:
        self._step += 1
        self.num_under_way += 1
        running = [self.holders.running[room] for room in granted]
        new_requests = [new_request(sequence, self._step) for sequence in running if not sequence.kv.announced_step]
        scheduled = [schedule(sequence, granted[sequence.room]) for sequence in running]
        if self._runs_ahead:
            for sequence, request in zip(running, scheduled, strict=True):
                sequence.kv.num_pending_samples += request.samples
        choice, load = self._choose(scheduled), self.holders.take_layerwise_load()
        return StepPlan(
            step=self._step,
            shape=choice.shape if load is None else replace(choice.shape, is_decode=False),
            new_requests=new_requests,
            scheduled=scheduled,
            releases=self.holders.take_releases(),
            estimate_s=choice.estimate_s,
            layerwise_load=load,
        )

    @property
    def _runs_ahead(self) -> bool:
        """Return whether steps may run ahead: no running sequence may have sampling that depends on its output."""
        return self._limits.runs_ahead and not any(
            sequence.submit.sampling.looks_back for sequence in self.holders.running.values()
        )

    def _precedence(self, sequence: TokenSequence) -> Precedence:
        prefix_len = self.holders.prefix_len(sequence)
        return precedence(
            priority=sequence.priority,
            arrival_number=sequence.arrival_number,
            prefix_len=prefix_len,
            pending_len=len(sequence.tokens) - prefix_len,
            chunk_tokens=min(self._chunk(prefix_len), self._limits.chunk_tokens) * self._limits.efficient_share,
            age_steps=self._step - sequence.first_step,
        )

    def _note_computing(self, sequence: TokenSequence, candidates: _Candidates, budget: Budget) -> None:
        end = sequence.kv.num_planned_tokens + budget.granted.get(sequence.room, 0)
        candidates.computed_by.update(dict.fromkeys(self._pending_keys(sequence, end), sequence))

    def _pending_keys(self, sequence: TokenSequence, end: int) -> list[bytes]:
        """Return the keys of the pages that are complete once the tokens before ``end`` are computed."""
        num_computed = sequence.kv.num_computed_tokens
        if end == num_computed:
            return []
        return self.holders.keys(sequence, end)[num_computed // self.page_size :]
