"""Host pages that are loaded during a step: which requests may begin early, and how long pages are held."""

import msgspec
import pytest

from cluster.spec.config import TransferBackendName
from cluster.spec.hicache_config import HicacheConfig
from cluster.spec.ids import Room
from cluster.spec.registry import Endpoint, KvOwnership
from cluster.spec.sampling import Sampled, Stopping
from cluster.spec.step_messages import StepPlan
from cluster.spec.tiers import CachedTokens, TierJob, TierJobKind, TierJobResult
from tests.fakes.sequences import sequence_of
from tests.fakes.tier_world import PAGE_SIZE, records_of
from workers.cache.lifetimes import live_pages
from workers.cache.page_allocator import PageAllocator
from workers.cache.prefix_tree import PrefixTree
from workers.context_parallel.strategy_chooser import undivided
from workers.hicache.tiers import Tiers
from workers.scheduler.sequence import TokenSequence
from workers.scheduler.step_scheduler import StepLimits, StepScheduler

NUM_PAGES = 12
PROMPT = [1, 2, 3, 4, 5, 6, 7]
CACHED = len(PROMPT) // PAGE_SIZE
"""Number of whole pages in the prompt."""


class Prefill:
    """Step scheduler over tiers whose jobs wait for the test."""

    def __init__(
        self,
        *,
        cp: int = 1,
        ownership: KvOwnership = KvOwnership.REPLICATED,
        backend: TransferBackendName = TransferBackendName.MOONCAKE,
        chunk_tokens: int = 64,
        depth: int = 1,
    ) -> None:
        tree, num_owners = PrefixTree(ownership.num_owners(cp)), ownership.num_owners(cp)
        self.num_ranks = cp
        self.allocator = PageAllocator(NUM_PAGES, tree, num_owners)
        endpoint = Endpoint(backend=backend, session="", base_address=0, num_bytes=1)
        records = [msgspec.structs.replace(record, host_endpoint=endpoint) for record in records_of(cp, ownership)]
        self.tiers = Tiers(HicacheConfig(), tree, 24, records)
        limits = StepLimits(PAGE_SIZE, chunk_tokens, 8, depth=depth)
        self.steps = StepScheduler(self.allocator, limits, undivided, tiers=self.tiers)
        self._num_added = 0
        self._last_owner = num_owners - 1

    def add(self, prompt: list[int], max_tokens: int = 1) -> TokenSequence:
        self._num_added += 1
        stopping = Stopping(max_tokens=max_tokens)
        sequence = sequence_of(self._num_added, prompt, stopping=stopping, owner_base=self._last_owner)
        self.steps.add(sequence)
        return sequence

    def plan(self) -> StepPlan:
        plan = self.steps.next_plan()
        assert plan is not None
        return plan

    def commit(self, plan: StepPlan) -> None:
        self.steps.commit(plan, {request.room: Sampled(token_id=9) for request in plan.scheduled if request.samples})
        self.check()

    def answer(self, order: TierJob, *, is_done: bool = True) -> None:
        for rank in range(self.num_ranks):
            done = [is_done] * len(order.pages)
            assert self.tiers.jobs.on_result(TierJobResult(job_id=order.job_id, global_rank=rank, done=done), 0.0)
        self.check()

    def orders(self) -> list[TierJob]:
        return [order for address, order in self.tiers.advance(0.0) if address == "0"]

    def remember(self, prompt: list[int]) -> None:
        """Cache a prompt in host memory only."""
        sequence = self.add(prompt)
        while sequence.num_outputs == 0:
            self.commit(self.plan())
        self.steps.holders.retire(sequence.room)
        for order in self.orders():
            assert order.kind is TierJobKind.SAVE
            self.answer(order)
        self.allocator.flush()
        assert self.allocator.num_cached == 0

    def check(self) -> None:
        self.steps.holders.check_integrity()
        self.allocator.check_integrity(self.steps.holders.all_pages)
        self.tiers.host.check_integrity()


OVER_A_NETWORK, ON_ONE_HOST = TransferBackendName.MOONCAKE, TransferBackendName.SHARED_MEMORY
JOINING = [
    (1, KvOwnership.REPLICATED, OVER_A_NETWORK),
    (2, KvOwnership.SHARDED, OVER_A_NETWORK),
    (2, KvOwnership.REPLICATED, ON_ONE_HOST),
]


@pytest.mark.parametrize(("cp", "ownership", "backend"), JOINING)
def test_a_single_sequence_is_computed_while_its_pages_load(
    cp: int, ownership: KvOwnership, backend: TransferBackendName
) -> None:
    prefill = Prefill(cp=cp, ownership=ownership, backend=backend)
    prefill.remember(PROMPT)
    sequence = prefill.add(PROMPT)
    plan = prefill.plan()
    assert plan.layerwise_load is not None
    assert plan.layerwise_load.kind is TierJobKind.LOAD
    assert [page.device for page in plan.layerwise_load.pages] == plan.scheduled[0].new_pages[0][:CACHED]
    assert plan.scheduled[0].first_position == CACHED * PAGE_SIZE
    assert sequence.kv.cached == CachedTokens(total=6, host=6)
    assert not prefill.orders(), "the order goes out twice"
    assert prefill.allocator.num_cached == 0, "others could read what is not there yet"
    prefill.answer(plan.layerwise_load)
    assert prefill.allocator.num_cached == CACHED
    prefill.commit(plan)
    assert sequence.tokens == [*PROMPT, 9]


def test_a_sampled_token_proves_the_load_and_late_results_change_nothing() -> None:
    prefill = Prefill()
    prefill.remember(PROMPT)
    sequence = prefill.add(PROMPT)
    plan = prefill.plan()
    prefill.commit(plan)
    assert prefill.allocator.num_cached == CACHED
    prefill.steps.holders.retire(sequence.room)
    again = prefill.add(PROMPT)
    assert plan.layerwise_load is not None
    prefill.answer(plan.layerwise_load)
    assert prefill.plan().layerwise_load is None
    assert again.kv.cached == CachedTokens(total=6)


def test_computation_continues_before_every_rank_has_reported() -> None:
    prefill = Prefill(chunk_tokens=2)
    prefill.remember(PROMPT)
    longer = prefill.add([*PROMPT, 8, 9, 10])
    first = prefill.plan()
    assert first.layerwise_load is not None
    prefill.commit(first)
    assert prefill.allocator.num_cached == 0, "a rank behind the others may still be copying"
    second = prefill.plan()
    assert (second.layerwise_load, second.scheduled[0].first_position) == (None, 8)
    prefill.answer(first.layerwise_load)
    assert prefill.allocator.num_cached == CACHED + 1
    prefill.commit(second)
    assert longer.tokens[-1] == 9


@pytest.mark.parametrize("is_sent", [False, True], ids=["loaded first", "sent first"])
@pytest.mark.parametrize(("cp", "ownership", "backend"), JOINING)
def test_pages_of_a_cancelled_request_are_held_until_loaded_and_sent(
    cp: int, ownership: KvOwnership, backend: TransferBackendName, *, is_sent: bool
) -> None:
    prefill = Prefill(cp=cp, ownership=ownership, backend=backend, chunk_tokens=2)
    prefill.remember(PROMPT)
    longer = prefill.add([*PROMPT, 8, 9, 10])
    plan = prefill.plan()
    assert plan.layerwise_load is not None
    prefill.commit(plan)
    free = prefill.allocator.num_free
    pages = live_pages(prefill.steps.holders.remove(longer.room))
    assert prefill.allocator.num_free == free
    if is_sent:
        prefill.allocator.free(pages)
        prefill.check()
        assert prefill.allocator.num_free == free, "a rank may still be copying"
    for rank in range(cp):
        done = [True] * CACHED
        assert prefill.tiers.jobs.on_result(
            TierJobResult(job_id=plan.layerwise_load.job_id, global_rank=rank, done=done), 0.0
        )
    if not is_sent:
        assert prefill.allocator.num_free == free, "a rank may still be sending"
        prefill.allocator.free(pages)
    prefill.check()
    assert prefill.allocator.num_free == prefill.allocator.num_pages
    assert prefill.allocator.num_cached == (CACHED + 1 if is_sent else 0)


def test_no_request_waits_for_the_pages_of_another() -> None:
    prefill = Prefill()
    prefill.remember(PROMPT)
    cached, other = prefill.add(PROMPT), prefill.add([20, 21])
    plan = prefill.plan()
    assert plan.layerwise_load is None
    assert [request.room for request in plan.scheduled] == [other.room]
    (order,) = prefill.orders()
    prefill.commit(plan)
    prefill.steps.holders.retire(other.room)
    assert not prefill.steps.has_work()
    prefill.answer(order)
    assert cached.kv.cached == CachedTokens(total=6, host=6)
    assert prefill.plan().scheduled[0].first_position == 6


def test_a_stream_does_not_wait_either() -> None:
    prefill = Prefill()
    prefill.remember(PROMPT)
    stream = prefill.add([20, 21], max_tokens=5)
    prefill.commit(prefill.plan())
    prefill.add(PROMPT)
    plan = prefill.plan()
    assert plan.layerwise_load is None
    assert [request.room for request in plan.scheduled] == [stream.room]


def test_network_loads_complete_before_the_step() -> None:
    prefill = Prefill(cp=2)
    prefill.remember(PROMPT)
    sequence = prefill.add(PROMPT)
    assert prefill.steps.next_plan() is None
    (order,) = prefill.orders()
    prefill.answer(order, is_done=False)
    assert sequence.kv.cached == CachedTokens()
    assert prefill.plan().scheduled[0].first_position == 0


def test_a_request_with_pending_loads_is_not_preempted() -> None:
    """Otherwise the load could write to pages that belong to another request."""
    prefill = Prefill(depth=2)
    prefill.remember([*range(30, 30 + 2 * NUM_PAGES - 3)])
    sequence = prefill.add([*range(30, 30 + 2 * NUM_PAGES - 3)], max_tokens=9)
    first = prefill.plan()
    assert first.layerwise_load is not None
    sequence.tokens += [9] * 4
    assert not prefill.steps.holders.grow(sequence, 6)
    assert sequence.kv.pages, "preempted"
    prefill.check()


def test_a_load_does_not_join_a_step_after_another_load() -> None:
    prefill = Prefill()
    prefill.remember(PROMPT)
    other = [11, 12, 13, 14, 15]
    prefill.remember(other)
    prefill.add(PROMPT)
    prefill.add([20, 21])
    prefill.commit(prefill.plan())
    (first,) = (order for order in prefill.orders() if order.kind is TierJobKind.LOAD)
    prefill.steps.holders.retire(Room(4))
    prefill.add(other)
    assert prefill.steps.next_plan() is None, "its step would wait for the load before it"
    (second,) = (order for order in prefill.orders() if order.kind is TierJobKind.LOAD)
    prefill.answer(second)
    prefill.answer(first)


def test_loads_before_a_preemption_are_not_reported_after_it() -> None:
    prefill = Prefill()
    prefill.remember(PROMPT)
    sequence = prefill.add(PROMPT)
    plan = prefill.plan()
    assert plan.layerwise_load is not None
    prefill.commit(plan)
    prefill.answer(plan.layerwise_load)
    prefill.steps.holders._preempt(sequence)
    prefill.allocator.flush()
    prefill.tiers.host.flush()
    prefill.plan()
    assert sequence.kv.cached == CachedTokens()
