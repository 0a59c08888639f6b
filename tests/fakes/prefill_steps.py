"""Step scheduler of prefill without ranks. A sequence ends with its first token and releases its pages."""

from cluster.spec.ids import Room
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import StepPlan
from tests.fakes.sequences import sequence_of
from workers.cache.page_allocator import PageAllocator
from workers.cache.prefix_tree import PrefixTree
from workers.context_parallel.chunk_sizes import ChunkLen
from workers.context_parallel.strategy_chooser import undivided
from workers.scheduler.step_scheduler import StepLimits, StepScheduler

PAGE_SIZE = 4


class PrefillSteps:
    """Scheduler that runs until the expected sequences have ended. Every step is checked against limits."""

    def __init__(
        self,
        *,
        num_pages: int = 2000,
        chunk_tokens: int = 64,
        max_requests: int = 64,
        efficient_share: float = 1.0,
        prefix_cache: bool = False,
        chunk: ChunkLen | None = None,
    ) -> None:
        self.limits = StepLimits(PAGE_SIZE, chunk_tokens, max_requests, efficient_share)
        self.allocator = PageAllocator(num_pages, PrefixTree() if prefix_cache else None)
        self.steps = StepScheduler(self.allocator, self.limits, undivided, chunk)
        self.ended: dict[Room, int] = {}
        """Step in which each sequence ended."""
        self.num_steps = 0
        self.num_computed = 0
        self._num_added = 0

    def add(self, prompt: int | list[int], priority: int = 0, *, tenant: str = "", weight: float = 1.0) -> Room:
        """Add a sequence with the given tokens, or with a number of tokens that no other sequence begins with."""
        room = Room(self._num_added)
        self._num_added += 1
        tokens = [-1 - room] * prompt if isinstance(prompt, int) else list(prompt)
        self.steps.add(sequence_of(room, tokens, priority=priority, tenant=tenant, weight=weight))
        return room

    def run_step(self) -> StepPlan | None:
        """Run one step. Return None if there is nothing to do."""
        has_work = self.steps.has_work()
        assert has_work or self.steps.num_waiting == 0, "everybody waits for pages that nobody holds"
        plan = self.steps.next_plan()
        assert has_work == (plan is not None)
        if plan is None:
            return None
        self.num_steps += 1
        num_tokens = sum(len(request.token_ids) for request in plan.scheduled)
        self.num_computed += num_tokens
        assert num_tokens <= self.limits.chunk_tokens
        assert len(plan.scheduled) <= self.limits.max_requests
        for sequence in self.steps.commit(
            plan, {request.room: Sampled(token_id=0) for request in plan.scheduled if request.samples}
        ):
            self.ended[sequence.room] = self.num_steps
            self.steps.holders.retire(sequence.room)
        self.steps.holders.check_integrity()
        self.allocator.check_integrity(self.steps.holders.all_pages)
        return plan

    def run(self) -> None:
        """Run steps until nothing is left to do."""
        while self.run_step() is not None:
            continue
