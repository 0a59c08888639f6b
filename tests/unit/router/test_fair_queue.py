"""Order of the fair queue."""

from hypothesis import given
from hypothesis import strategies as st

from router.fair_queue import FairQueue

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 5.0}
LARGEST = 50


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, LARGEST)), min_size=1, max_size=200), st.randoms())
def test_tenants_that_wait_all_the_time_are_served_in_proportion(items, generator) -> None:  # type: ignore[no-untyped-def]
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for tenant, cost in items:
        queue.push((tenant, cost), tenant, cost, WEIGHTS[tenant])
    served = dict.fromkeys(WEIGHTS, 0.0)
    while len({tenant for tenant, _ in queue}) == len(WEIGHTS):
        tenant, cost = queue.pop()
        served[tenant] += cost / WEIGHTS[tenant]
        if generator.random() < 0.2:
            queue.push(("a", cost), "a", cost, WEIGHTS["a"])
        assert max(served.values()) - min(served.values()) <= 2 * LARGEST


def test_one_tenant_is_served_in_order() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(100):
        queue.push(number, "", cost=100 - number, priority=number % 2)
    assert [queue.pop() for _ in range(100)] == [*range(0, 100, 2), *range(1, 100, 2)]


def test_an_idle_tenant_saves_nothing_up() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(9):
        queue.push(f"a{number}", "a", 1)
    assert [queue.pop() for _ in range(4)] == ["a0", "a1", "a2", "a3"]
    for number in range(3):
        queue.push(f"b{number}", "b", 1)
    assert [queue.pop() for _ in range(6)] == ["b0", "a4", "b1", "a5", "b2", "a6"]


def test_a_tenant_owes_nothing_for_items_that_left() -> None:
    queue: FairQueue[str] = FairQueue()
    left = [f"a{number}" for number in range(20)]
    for number, item in enumerate(left):
        queue.push(item, "a", 1)
        queue.push(f"b{number}", "b", 1)
    for item in left:
        queue.remove(item)
    queue.push("a", "a", 1)
    assert [queue.pop(), queue.pop()] == ["b0", "a"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, LARGEST)), min_size=1, max_size=200))
def test_work_beyond_the_cost_counts_like_cost(items: list[tuple[str, int]]) -> None:
    """All items wait from the beginning, so their places do not know what they will take."""
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for tenant, work in items:
        queue.push((tenant, work), tenant, 1, WEIGHTS[tenant])
    served = dict.fromkeys(WEIGHTS, 0.0)
    while len({tenant for tenant, _ in queue}) == len(WEIGHTS):
        tenant, work = queue.pop()
        queue.charge(tenant, work - 1, WEIGHTS[tenant])
        served[tenant] += work / WEIGHTS[tenant]
        assert max(served.values()) - min(served.values()) <= 2 * LARGEST


def test_a_tenant_that_paid_its_debt_owes_nothing_more() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(3):
        queue.push(f"a{number}", "a", 1)
    for number in range(9):
        queue.push(f"b{number}", "b", 1)
    assert queue.pop() == "a0"
    queue.charge("a", 4)
    assert [queue.pop() for _ in range(6)] == ["b0", "b1", "b2", "b3", "b4", "a1"]
    queue.push("a3", "a", 1)
    assert [queue.pop() for _ in range(5)] == ["b5", "a2", "b6", "b7", "a3"]


def test_removed_items_are_not_served() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a0", "a1", "b0"):
        queue.push(item, item[0], 1)
    assert queue.least_entitled() == "a1"
    queue.remove("a0")
    queue.remove("gone")
    assert [queue.pop(), queue.pop()] == ["b0", "a1"]
    assert len(queue) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 9)), max_size=60), st.randoms())
def test_items_that_leave_do_not_change_the_order_of_the_others(items, generator) -> None:  # type: ignore[no-untyped-def]
    """Items of priority 2 leave before they are served."""
    everyone, others = FairQueue[int](), FairQueue[int]()
    for number, (tenant, priority, _) in enumerate(items):
        everyone.push(number + 1000, tenant, 0, priority=priority)
        if priority < 2:
            others.push(number + 1000, tenant, 0, priority=priority)
    leaving = [item for item in everyone if items[item - 1000][1] == 2]
    generator.shuffle(leaving)
    for item in leaving:
        everyone.remove(item)
        everyone.remove(item)
    assert len(everyone) == len(others)
    while others:
        assert (everyone.first, everyone.behind_first()) == (others.first, others.behind_first())
        assert everyone.pop() == others.pop()
