"""Shares of tenants in a step's tokens and in the pages of a pool."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cluster.spec.ids import Role, Room
from cluster.spec.messages import Message, Output
from cluster.spec.phases import ComputedStep
from cluster.spec.sampling import Sampled, Stopping
from cluster.spec.step_messages import StepPlan
from cluster.spec.transfer_messages import Ticket
from tests.fakes.leader_pair import LeaderPair
from tests.fakes.paged_ranks import PAGE_SIZE
from tests.fakes.prefill_steps import PrefillSteps
from tests.fakes.sequences import sequence_of
from workers.cache.page_allocator import PageAllocator
from workers.context_parallel.strategy_chooser import undivided
from workers.scheduler.sequence import KvState
from workers.scheduler.step_scheduler import OLDEST_SHARE, TURNS, StepLimits, StepScheduler

CHUNK = 64


class TenantSteps(PrefillSteps):
    """Prefill steps that count each tenant's tokens."""

    def __init__(self, *, max_requests: int = 64, num_pages: int = 5000) -> None:
        super().__init__(num_pages=num_pages, chunk_tokens=CHUNK, max_requests=max_requests)
        self.tenants: dict[Room, str] = {}
        self.weights: dict[str, float] = {}
        self.lengths: dict[Room, int] = {}
        self.served = Counter[str]()

    def flood(self, tenant: str, lengths: Iterable[int], weight: float = 1.0, priority: int = 0) -> list[Room]:
        self.weights[tenant] = weight
        rooms = [self.add(length, priority, tenant=tenant, weight=weight) for length in lengths]
        self.tenants |= dict.fromkeys(rooms, tenant)
        self.lengths |= dict(zip(rooms, lengths, strict=True))
        return rooms

    def run_step(self) -> StepPlan | None:
        plan = super().run_step()
        for request in plan.scheduled if plan else ():
            self.served[self.tenants[request.room]] += len(request.token_ids)
        return plan

    def served_in(self, num_steps: int) -> Counter[str]:
        """Run steps. Return the tokens by tenant."""
        before = self.served.copy()
        for _ in range(num_steps):
            self.run_step()
        return self.served - before

    def backlogged(self) -> set[str]:
        return {tenant for room, tenant in self.tenants.items() if room not in self.ended}


@pytest.mark.parametrize("weight", [1.0, 3.0, 1 / 3])
@pytest.mark.parametrize("length", [16, 3 * CHUNK])
def test_a_flood_costs_another_tenant_at_most_its_share(weight: float, length: int) -> None:
    """The flood of short or long prompts is 2,000 requests ahead."""
    steps = TenantSteps()
    steps.flood("flood", [length] * 2000)
    steps.served_in(5)
    (short,) = steps.flood("other", [16], weight)
    steps.run_step()
    assert short in steps.ended
    steps.flood("other", [40 * CHUNK], weight)
    served = steps.served_in(40)
    assert served["other"] == pytest.approx(40 * CHUNK * weight / (1 + weight), rel=0.1)
    assert served.total() == 40 * CHUNK


def test_idle_tenants_neither_save_nor_owe() -> None:
    steps = TenantSteps()
    steps.flood("early", [CHUNK] * 150)
    steps.flood("rare", [8])
    steps.served_in(50)
    steps.flood("late", [CHUNK] * 150)
    steps.served_in(50)
    steps.flood("rare", [30 * CHUNK])
    assert all(count == pytest.approx(20 * CHUNK, rel=0.1) for count in steps.served_in(60).values())


def test_priority_goes_before_shares() -> None:
    steps = TenantSteps()
    steps.flood("flood", [CHUNK] * 300, priority=-1)
    steps.flood("other", [100 * CHUNK])
    # A length class's part of the oldest sequences' share.
    assert steps.served_in(40)["other"] == 40 * (CHUNK // 8 - 1)


requests = st.lists(st.integers(1, 4 * CHUNK), min_size=1, max_size=6)


@settings(max_examples=50)
@given(
    arrivals=st.lists(st.tuples(st.sampled_from("abc"), requests), min_size=1, max_size=12),
    weights=st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=3, max_size=3),
    num_pages=st.sampled_from([70, 5000, 5000]),
)
def test_tenants_with_a_backlog_are_served_alike_and_everybody_ends(
    arrivals: list[tuple[str, list[int]]], weights: list[float], num_pages: int
) -> None:
    """Two tenants with a backlog differ by at most twice the oldest sequences' share, unless pages are short."""
    steps = TenantSteps(max_requests=1000, num_pages=num_pages)
    weight_of = dict(zip("abc", weights, strict=True))
    bound = 2 * CHUNK * max(OLDEST_SHARE, 1 / TURNS) / min(weights) if num_pages > 70 else math.inf
    since: dict[tuple[str, str], float] = {}
    while arrivals or steps.steps.has_work():
        if arrivals:
            tenant, lengths = arrivals.pop()
            steps.flood(tenant, lengths, weight_of[tenant])
        steps.run_step()
        gaps = {
            (one, other): steps.served[one] / weight_of[one] - steps.served[other] / weight_of[other]
            for one in steps.backlogged()
            for other in steps.backlogged()
        }
        since = {pair: since.get(pair, gap) for pair, gap in gaps.items()}
        assert all(abs(gap - since[pair]) <= bound for pair, gap in gaps.items())
    assert steps.ended.keys() == steps.tenants.keys()


@given(
    lengths=st.lists(st.tuples(st.integers(1, 3 * CHUNK), st.integers(-1, 1)), max_size=30),
    num_pages=st.integers(50, 400),
)
def test_a_single_tenants_name_and_weight_change_nothing(lengths: list[tuple[int, int]], num_pages: int) -> None:
    plans: dict[str, list[StepPlan]] = defaultdict(list)
    for tenant in ("", "a"):
        steps = TenantSteps(max_requests=4, num_pages=num_pages)
        for length, priority in lengths:
            steps.flood(tenant, [length], 3.0 if tenant else 1.0, priority)
            if plan := steps.run_step():
                plans[tenant].append(plan)
        while plan := steps.run_step():
            plans[tenant].append(plan)
    assert plans[""] == plans["a"]


def test_a_large_prompt_gets_pages_despite_an_older_flood_of_smaller_ones() -> None:
    """The large prompt and one of the flood fit together, but not with a second one that starts meanwhile."""
    steps = TenantSteps(num_pages=100)
    steps.flood("flood", [18 * PAGE_SIZE] * 200)
    steps.served_in(5)
    (large,) = steps.flood("other", [81 * PAGE_SIZE], weight=0.2)
    steps.served_in(25)
    assert large in steps.ended


def test_streams_take_turns_if_a_step_cannot_have_them_all() -> None:
    allocator = PageAllocator(1000)
    steps = StepScheduler(allocator, StepLimits(PAGE_SIZE, CHUNK, 4), undivided)
    for room in range(20):
        tenant = "other" if room >= 18 else "flood"
        stream = sequence_of(room, [1, 2], stopping=Stopping(max_tokens=100), tenant=tenant)
        stream.tokens.append(3)
        stream.kv = KvState.after(2, allocator.allocate([(1, 0)]))
        steps.add(stream)
    counts = Counter[int]()
    for _ in range(20):
        plan = steps.next_plan()
        assert plan is not None
        steps.commit(plan, {request.room: Sampled(token_id=1) for request in plan.scheduled})
        counts.update(int(request.room) for request in plan.scheduled)
    assert counts[18] + counts[19] == 20 * 4 / 2


class DecodeOnly:
    """Decode leader that computes prompts itself."""

    def __init__(self, num_pages: int) -> None:
        self.pair = LeaderPair(num_pages, prefix_cache=False)
        self.num_outputs = Counter[Room]()
        self.ended: dict[Room, int] = {}
        self.num_steps = 0

    def submit(self, tenant: str, num_pages: int, max_tokens: int, prompt_of: Room | None = None) -> Room:
        prompt = [1] * (num_pages * PAGE_SIZE - 1)
        submit = self.pair.submit(prompt, max_tokens, prompt_of=prompt_of, tenant=tenant)
        self._take(self.pair.deliver(Role.DECODE, replace(submit, prefill=None)))
        return submit.room

    @property
    def num_preempted(self) -> int:
        return self.pair.decode.load().num_preempted

    def fill_pool(self) -> None:
        while self.pair.allocators[Role.DECODE].num_free:
            self.run_step()

    def count_tickets(self, *messages: Message) -> int:
        """Return for how many requests the leader asks prefill when these messages arrive."""
        return sum(isinstance(said, Ticket) for said in self.pair.deliver(Role.DECODE, *messages))

    def run_step(self) -> None:
        decode = self.pair.decode
        plan, decode.outgoing, self.num_steps = decode.next_plan(), [], self.num_steps + 1
        assert plan is not None
        decode.commit(
            plan, {each.room: Sampled(token_id=1) for each in plan.scheduled if each.samples}, ComputedStep(0.0, 0.0)
        )
        decode.check_integrity()
        self._take(message for _, message in decode.outgoing)

    def _take(self, messages: Iterable[object]) -> None:
        for output in messages:
            if isinstance(output, Output):
                self.num_outputs[output.room] += len(output.token_ids)
                if output.finish is not None:
                    self.ended[output.room] = self.num_steps


@pytest.mark.parametrize(("num_pages", "is_granted"), [(1, True), (15, True), (40, True), (41, False)])
def test_a_tenant_within_its_share_does_not_wait_for_the_end_of_others(num_pages: int, is_granted: bool) -> None:
    """Choices of another tenant, which want 25 pages each, have filled the pool of 80."""
    steps = DecodeOnly(80)
    first = steps.submit("flood", 2, 25 * PAGE_SIZE)
    choices = [steps.submit("flood", 2, 25 * PAGE_SIZE, first) for _ in range(40)]
    steps.fill_pool()
    before = steps.num_preempted
    tickets = steps.count_tickets(steps.pair.submit([2] * num_pages * PAGE_SIZE, tenant="other"))
    assert tickets + steps.count_tickets() == is_granted
    assert (steps.num_preempted > before) == is_granted
    while not steps.ended.keys() >= {first, *choices}:
        steps.run_step()


def test_a_preempted_tenant_does_not_take_its_pages_back() -> None:
    """The preempted sequence was all that its tenant ran, so its tenant then holds less than the waiting one's."""
    steps = DecodeOnly(80)
    steps.submit("within", 10, 20 * PAGE_SIZE)
    steps.run_step()
    large = steps.submit("above", 55, 8)
    while large not in steps.num_outputs:
        steps.run_step()
    tickets = steps.count_tickets(steps.pair.submit([2] * 14 * PAGE_SIZE, tenant="within"))
    for _ in range(40):
        tickets += steps.count_tickets()
        steps.run_step()
    assert (tickets, steps.num_preempted) == (1, 1)


def test_nothing_is_preempted_in_vain() -> None:
    """The oldest choice, which is never preempted, leaves too few pages for a request within its tenant's share."""
    steps = DecodeOnly(40)
    first = steps.submit("flood", 20, 25 * PAGE_SIZE)
    for _ in range(9):
        steps.submit("flood", 20, 25 * PAGE_SIZE, first)
    steps.fill_pool()
    before = steps.num_preempted
    tickets = steps.count_tickets(steps.pair.submit([2] * 20 * PAGE_SIZE, tenant="other"))
    assert (tickets + steps.count_tickets(), steps.num_preempted) == (0, before)


@pytest.mark.parametrize("num_steps", range(1, 100, 7))
def test_pages_promised_to_another_tenant_do_not_delay_one_within_its_share(num_steps: int) -> None:
    """Choices of a prompt of less than a page share none; they get theirs when the step scheduler starts them."""
    steps = DecodeOnly(40)
    first = steps.submit("flood", 1, 25 * PAGE_SIZE)
    for _ in range(60):
        steps.submit("flood", 1, 25 * PAGE_SIZE, first)
    for _ in range(num_steps):
        steps.run_step()
    tickets = steps.count_tickets(steps.pair.submit([2] * PAGE_SIZE, tenant="other"))
    assert tickets + steps.count_tickets() == 1


@pytest.mark.parametrize(("num_pages", "most_steps"), [(4, 30), (30, 200)])
def test_choices_that_fill_the_pool_leave_pages_to_another_tenant_and_end_too(num_pages: int, most_steps: int) -> None:
    """128 choices of a prompt of half the pool want 100 tokens each. The other tenant sends one request at a time.

    A large request waits until the choices that run at its arrival have ended, but not for the preempted ones.
    """
    steps = DecodeOnly(40)
    first = steps.submit("flood", 20, 25 * PAGE_SIZE)
    choices = {first, *(steps.submit("flood", 20, 25 * PAGE_SIZE, first) for _ in range(127))}
    for _ in range(30):
        steps.run_step()
    for _ in range(10):
        room, before = steps.submit("other", num_pages, 4), steps.num_steps
        while room not in steps.ended:
            steps.run_step()
            assert steps.num_steps - before <= most_steps
    assert not steps.ended.keys() >= choices
    while not steps.ended.keys() >= choices:
        steps.run_step()


def test_a_tenant_with_more_pages_does_not_overtake_a_large_request() -> None:
    steps = DecodeOnly(40)
    for _ in range(200):
        steps.submit("flood", 3, 2 * PAGE_SIZE)
    for _ in range(50):
        steps.run_step()
    for _ in range(3):
        room, before = steps.submit("other", 36, 4), steps.num_steps
        while room not in steps.ended:
            steps.run_step()
            assert steps.num_steps - before <= 50


@pytest.mark.parametrize(("max_tokens", "is_granted"), [(2, True), (3, False)])
def test_new_requests_leave_a_page_to_a_sequence_that_outgrows_its_own(max_tokens: int, is_granted: bool) -> None:
    steps = DecodeOnly(8)
    steps.submit("first", 2, max_tokens)
    steps.run_step()
    assert steps.count_tickets(steps.pair.submit([1] * 6 * PAGE_SIZE)) == is_granted


@pytest.mark.parametrize(("is_running", "counts"), [(False, [40, 0]), (True, [32, 8])])
def test_requests_get_pages_in_several_rounds_while_a_sequence_runs(is_running: bool, counts: list[int]) -> None:
    steps = DecodeOnly(100)
    if is_running:
        steps.submit("first", 2, 8)
        steps.run_step()
    submits = [steps.pair.submit([number] * PAGE_SIZE) for number in range(40)]
    assert [steps.count_tickets(*submits), steps.count_tickets()] == counts


def test_the_tenant_with_the_most_pages_per_weight_is_preempted_but_not_the_oldest_sequence() -> None:
    steps = StepScheduler(PageAllocator(10), StepLimits(PAGE_SIZE, CHUNK, 8), undivided)
    tenants = ["flood", "flood", "other", "heavy", "flood"]
    for room, tenant in enumerate(tenants):
        weight = 4.0 if tenant == "heavy" else 1.0
        steps.add(sequence_of(room, [room] * PAGE_SIZE * 2, max_len=40, tenant=tenant, weight=weight))
    assert steps.next_plan() is not None
    holders, preempted = steps.holders, list[int]()
    for _ in range(3):
        oldest = holders.running[Room(0)]
        assert holders.grow(oldest, oldest.kv.num_pages * PAGE_SIZE - oldest.kv.num_planned_tokens + 2 * PAGE_SIZE)
        preempted += [int(sequence.room) for sequence in holders.waiting if sequence.room not in preempted]
    assert preempted == [4, 1, 2]
