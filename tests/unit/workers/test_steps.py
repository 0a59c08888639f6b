"""The step scheduler with a model whose next token is a function of the whole sequence so far."""

from collections import deque
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.ids import Room
from cluster.spec.sampling import Sampled, Sampling, Stopping
from cluster.spec.step_messages import StepPlan
from tests.fakes.sequences import sequence_of
from workers.cache.lifetimes import live_pages
from workers.cache.page_allocator import PageAllocator
from workers.cache.prefix_tree import PrefixTree
from workers.context_parallel.strategy_chooser import undivided
from workers.scheduler.sequence import TokenSequence
from workers.scheduler.step_scheduler import StepLimits, StepScheduler

PAGE_SIZE = 4
MAX_LEN = 30


def next_token(tokens: list[int]) -> int:
    return (sum(tokens) * 31 + len(tokens)) % 1009


def sequence(
    room: int,
    prompt: list[int],
    max_tokens: int,
    owner_base: int = 0,
    stops: Iterable[int] = (),
    penalty: float = 0.0,
    priority: int = 0,
    tenant: str = "",
) -> TokenSequence:
    return sequence_of(
        room,
        prompt,
        sampling=Sampling(frequency_penalty=penalty),
        stopping=Stopping(max_tokens=max_tokens, stop_token_ids=frozenset(stops)),
        max_len=MAX_LEN,
        priority=priority,
        owner_base=owner_base,
        tenant=tenant,
    )


class Ranks:
    """Followers with tokens in pages according to the plans, which they check for consistency."""

    def __init__(self) -> None:
        self.tokens: dict[Room, list[int]] = {}
        self.pages: dict[Room, list[int]] = {}
        self.sampled: dict[Room, int] = {}
        """Sampled tokens of the latest step."""

    def execute(self, plan: StepPlan) -> dict[Room, Sampled]:
        for room in plan.releases:
            del self.tokens[room], self.pages[room]
        for new in plan.new_requests:
            assert new.room not in self.tokens
            self.tokens[new.room], self.pages[new.room] = [], []
        sampled: dict[Room, Sampled] = {}
        for request in plan.scheduled:
            self.pages[request.room] += live_pages(request.new_pages)
            assert request.token_ids, "a request without tokens"
            known = self.tokens[request.room]
            assert request.first_position == len(known)
            known += [self.sampled[request.room]] if request.input_from_previous_step else request.token_ids
            assert len(self.pages[request.room]) * PAGE_SIZE >= len(known)
            if request.samples:
                sampled[request.room] = Sampled(token_id=next_token(known))
        self.sampled = {room: each.token_id for room, each in sampled.items()}
        in_step = [page for request in plan.scheduled for page in self.pages[request.room]]
        assert len(in_step) == len(set(in_step)), "two requests of a step share a page"
        return sampled


@given(
    prompts=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=20), min_size=1, max_size=8),
    max_tokens=st.integers(1, 20),
    num_pages=st.integers(10, 30),
    chunk_tokens=st.integers(1, 16),
    max_requests=st.integers(1, 4),
    num_owners=st.integers(1, 3),
    depth=st.integers(1, 3),
    runs_ahead=st.booleans(),
    stops=st.sampled_from([range(0), range(0, 1009, 5)]),
    penalty=st.sampled_from([0.0, 0.0, 1.0]),
    max_context_tokens=st.sampled_from([None, 12]),
    num_tenants=st.integers(1, 3),
)
def test_outputs_do_not_depend_on_chunks_batches_preemptions_or_steps_under_way(
    prompts: list[list[int]],
    max_tokens: int,
    num_pages: int,
    chunk_tokens: int,
    max_requests: int,
    num_owners: int,
    depth: int,
    runs_ahead: bool,
    stops: range,
    penalty: float,
    max_context_tokens: int | None,
    num_tenants: int,
) -> None:
    """Every third request has a penalty that depends on earlier tokens."""
    depth = 2 if runs_ahead else depth
    allocator = PageAllocator(-(-num_pages // num_owners), num_owners=num_owners)
    limits = StepLimits(
        PAGE_SIZE, chunk_tokens, max_requests, depth=depth, runs_ahead=runs_ahead, max_context_tokens=max_context_tokens
    )
    steps = StepScheduler(allocator, limits, undivided)
    ranks = Ranks()
    under_way: deque[tuple[StepPlan, dict[Room, Sampled]]] = deque()
    for room, prompt in enumerate(prompts):
        added = sequence(
            room,
            prompt,
            max_tokens,
            room % num_owners,
            stops,
            0.0 if room % 3 else penalty,
            tenant=str(room % num_tenants),
        )
        steps.add(added)
    finished: dict[int, list[int]] = {}
    for _ in range(5000):
        plan = steps.next_plan()
        if plan is not None:
            assert sum(len(request.token_ids) for request in plan.scheduled) <= chunk_tokens
            assert len(plan.scheduled) <= max_requests
            under_way.append((plan, ranks.execute(plan)))
            assert len(under_way) <= depth
            if len(under_way) < depth:
                continue
        if not under_way:
            break
        for advanced in steps.commit(*under_way.popleft()):
            if advanced.finish_reason():
                finished[advanced.room] = advanced.tokens
                allocator.free(live_pages(steps.holders.remove(advanced.room)))
        steps.holders.check_integrity()
        allocator.check_integrity(steps.holders.all_pages)
    assert finished == {room: answered(prompt, max_tokens, stops) for room, prompt in enumerate(prompts)}
    assert allocator.num_free == allocator.num_pages


def answered(prompt: list[int], max_tokens: int, stops: range) -> list[int]:
    """Return the prompt and its answer, one token after another."""
    tokens = list(prompt)
    for _ in range(min(max_tokens, MAX_LEN - len(prompt))):
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens


def test_a_request_is_not_starved_by_rivals_for_one_owners_pages() -> None:
    """There are enough pages in total, but not at the owner of everybody's first page."""
    allocator = PageAllocator(4, num_owners=4)
    steps = StepScheduler(allocator, StepLimits(PAGE_SIZE, 64, 8, depth=40), undivided)
    steps.add(sequence(1, [1], 1))
    assert steps.next_plan() is not None
    steps.add(sequence(0, [1] * 13 * PAGE_SIZE, 1))
    for room in range(2, 40):
        steps.add(sequence(room, [1], 1))
        plan = steps.next_plan()
        if plan is not None and any(request.room == 0 for request in plan.scheduled):
            return
        allocator.free(live_pages(steps.holders.remove(Room(room - 1))))
    raise AssertionError("the large request was passed every time")


def test_the_newest_sequence_gives_its_pages_back_when_the_pool_runs_dry() -> None:
    allocator = PageAllocator(4)
    steps = StepScheduler(allocator, StepLimits(PAGE_SIZE, 64, 8), undivided)
    ranks = Ranks()
    for room in range(2):
        steps.add(sequence(room, [room] * 7, 8))
    while steps.holders.num_preemptions == 0:
        plan = steps.next_plan()
        assert plan is not None
        steps.commit(plan, ranks.execute(plan))
    assert (len(steps.holders.running), steps.num_waiting) == (1, 1)
    plan = steps.next_plan()
    assert plan is not None
    assert [request.room for request in plan.scheduled] == [0]


def test_the_latest_of_the_least_urgent_is_preempted_despite_older_pages() -> None:
    """Room 0 is the oldest and starts again after the others. Room 2 arrived before room 3 and is less urgent."""
    steps = StepScheduler(PageAllocator(8), StepLimits(PAGE_SIZE, 64, 8), undivided)
    holders = steps.holders
    priorities = [0, 0, 1, 0]
    for room, priority in enumerate(priorities):
        steps.add(sequence(room, [room] * 7, 8, priority=priority))
        assert holders.start(next(iter(holders.waiting)))
    oldest = holders.running[Room(0)]
    holders._preempt(oldest)
    assert holders.start(oldest)
    assert list(holders.running)[-1] == oldest.room
    preempted = []
    for _ in range(3):
        assert holders.grow(oldest, oldest.kv.num_pages * PAGE_SIZE - oldest.kv.num_planned_tokens + 1)
        oldest.kv.num_planned_tokens = oldest.kv.num_pages * PAGE_SIZE
        preempted += [waiting.room for waiting in holders.waiting if waiting.room not in preempted]
    assert preempted == [2, 3]
    assert not holders.grow(holders.running[Room(1)], 8 * PAGE_SIZE), "it goes before one that is older"
    assert list(holders.running) == [oldest.room]


def test_at_most_one_chunk_of_a_prompt_per_stage_is_in_flight() -> None:
    steps = StepScheduler(PageAllocator(8), StepLimits(PAGE_SIZE, 4, 8, depth=3), undivided)
    steps.add(sequence(0, list(range(18)), 4))
    plans = [steps.next_plan() for _ in range(4)]
    assert [plan and (plan.scheduled[0].first_position, plan.scheduled[0].samples) for plan in plans] == [
        (0, False),
        (4, False),
        (8, False),
        None,
    ]
    assert not steps.has_work()
    assert plans[0] is not None
    steps.commit(plans[0], {})
    last = steps.next_plan()
    assert last is not None
    assert (last.scheduled[0].first_position, last.scheduled[0].samples) == (12, False)


def test_streams_are_divided_over_the_steps_under_way() -> None:
    steps = StepScheduler(PageAllocator(64), StepLimits(PAGE_SIZE, 64, 8, depth=2), undivided)
    for room in range(5):
        running = sequence(room, [1, 2], 4)
        steps.add(running)
    first = steps.next_plan()
    assert first is not None
    steps.commit(first, {request.room: Sampled(token_id=3) for request in first.scheduled})
    plans = [steps.next_plan(), steps.next_plan()]
    assert [plan and [request.room for request in plan.scheduled] for plan in plans] == [[0, 1, 2], [3, 4]]


def test_a_removed_sequence_hands_its_pages_to_the_caller() -> None:
    allocator = PageAllocator(4)
    steps = StepScheduler(allocator, StepLimits(PAGE_SIZE, 64, 8), undivided)
    steps.add(sequence(0, [1] * 9, 4))
    plan = steps.next_plan()
    assert plan is not None
    pages = live_pages(steps.holders.remove(Room(0)))
    assert len(pages) == 3
    allocator.check_integrity(pages)
    assert steps.commit(plan, {Room(0): Sampled(token_id=1)}) == []
    assert not steps.has_work()


@pytest.mark.parametrize("is_corrupted", [False, True])
def test_kv_that_leads_to_corrupted_logits_is_not_cached(*, is_corrupted: bool) -> None:
    """The cached page is from an earlier step, whose logits were finite."""
    allocator = PageAllocator(8, PrefixTree())
    steps = StepScheduler(allocator, StepLimits(PAGE_SIZE, 64, 8), undivided)
    for room, prompt in enumerate([[1] * PAGE_SIZE, [1] * 3 * PAGE_SIZE]):
        steps.add(sequence(room, prompt, 4))
        plan = steps.next_plan()
        assert plan is not None
        (sampled,) = steps.commit(plan, {Room(room): Sampled(token_id=0, is_corrupted=bool(room) and is_corrupted)})
        steps.holders.retire(sampled.room)
    assert allocator.num_cached == (1 if is_corrupted else 3)
    allocator.check_integrity([])


def test_a_step_continues_from_pending_tokens_unless_sampling_needs_them() -> None:
    limits = StepLimits(PAGE_SIZE, 64, 8, depth=2, runs_ahead=True)
    steps = StepScheduler(PageAllocator(64), limits, undivided)
    steps.add(sequence(0, [1, 2], 3))
    first, second = steps.next_plan(), steps.next_plan()
    assert first is not None
    assert second is not None
    assert [
        (request.input_from_previous_step, request.first_position, request.output_position)
        for request in second.scheduled
    ] == [(True, 2, 1)]
    assert steps.next_plan() is None
    steps.commit(first, {Room(0): Sampled(token_id=3)})
    steps.add(sequence(1, [1, 2], 3, penalty=1.0))
    third = steps.next_plan()
    assert third is not None
    assert [(request.room, request.input_from_previous_step, request.samples) for request in third.scheduled] == [
        (0, True, True),
        (1, False, True),
    ]
    steps.commit(second, {Room(0): Sampled(token_id=4)})
    assert not steps.has_work(), "the third token is the last, and the other request looks back"
    steps.commit(third, {Room(room): Sampled(token_id=5) for room in (0, 1)})
    steps.holders.remove(Room(0))
    fourth = steps.next_plan()
    assert fourth is not None
    assert [(request.room, request.token_ids) for request in fourth.scheduled] == [(1, [5])]
    assert not steps.has_work()


def test_a_step_ahead_does_not_cost_the_token_under_way() -> None:
    """No page is free for the token after the prompt. The other request waits for this prompt's pages."""
    allocator = PageAllocator(8, PrefixTree())
    allocator.allocate([(4, 0)])
    steps = StepScheduler(allocator, StepLimits(PAGE_SIZE, 64, 8, depth=2, runs_ahead=True), undivided)
    prompt = list(range(4 * PAGE_SIZE))
    steps.add(sequence(0, prompt, 3))
    steps.add(sequence(1, [*prompt, 1], 3))
    plan = steps.next_plan()
    assert plan is not None
    assert [request.room for request in plan.scheduled] == [0]
    assert steps.next_plan() is None
    assert [advanced.room for advanced in steps.commit(plan, {Room(0): Sampled(token_id=5)})] == [0]


def test_prompts_that_do_not_fit_together_alternate() -> None:
    """The urgent prompt, which arrives late, gets every other step, like the earlier prompt."""
    limits = StepLimits(PAGE_SIZE, 8, 8, max_context_tokens=64)
    allocator = PageAllocator(64)
    steps = StepScheduler(allocator, limits, undivided)
    steps.add(sequence(0, [1] * 64, 1, priority=1))
    computed: list[dict[int, int]] = []
    for step in range(16):
        if step == 3:
            steps.add(sequence(1, [2] * 64, 1))
        plan = steps.next_plan()
        assert plan is not None
        computed.append({int(request.room): len(request.token_ids) for request in plan.scheduled})
        assert sum(request.first_position + len(request.token_ids) for request in plan.scheduled) <= 64
        for ended in steps.commit(
            plan, {request.room: Sampled(token_id=0) for request in plan.scheduled if request.samples}
        ):
            allocator.free(live_pages(steps.holders.remove(ended.room)))
    both = [{1: 8}, {0: 4, 1: 4}] * 2
    assert computed == [{0: 8}] * 3 + both + [{1: 8}, {0: 8}] * 4 + [{1: 8}]


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
def test_the_oldest_have_their_share_on_average(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """The share also holds in ring mode, where all prompts fit into a step."""
    monkeypatch.setattr("workers.scheduler.step_scheduler.OLDEST_SHARE", share)
    tokens = []
    for max_context_tokens in (None, 10_000):
        limits = StepLimits(PAGE_SIZE, 8, 8, max_context_tokens=max_context_tokens)
        steps = StepScheduler(PageAllocator(1000), limits, undivided)
        steps.add(sequence(0, [1] * 1000, 1, priority=1))
        steps.add(sequence(1, [2] * 1000, 1))
        of_oldest = 0
        for _ in range(20):
            plan = steps.next_plan()
            assert plan is not None
            of_oldest += sum(len(request.token_ids) for request in plan.scheduled if request.room == 0)
            steps.commit(plan, {})
        tokens.append(of_oldest)
    assert tokens == [int(20 * 8 * share)] * 2
