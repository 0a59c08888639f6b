"""Memory that connections hold: who is disconnected when it is too much."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.http.holdings import Holdings
from tests.fakes.wire import Wire

LIMIT = 100


def test_the_connection_that_has_held_something_for_longest_is_disconnected() -> None:
    holdings, wires = Holdings(LIMIT), [Wire() for _ in range(4)]
    for wire in wires[:3]:
        holdings.hold(wire, "client", 30)
    holdings.forget(wires[0])
    holdings.hold(wires[0], "client", 40)
    assert not any(wire.is_aborted for wire in wires)
    holdings.hold(wires[3], "client", 1)
    assert [wire.is_aborted for wire in wires] == [False, True, False, False]


def test_a_connection_that_grows_keeps_its_place() -> None:
    holdings, first, second = Holdings(LIMIT), Wire(), Wire()
    for wire, num_bytes in [(first, 30), (second, 30), (first, 70), (second, 31)]:
        holdings.hold(wire, "client", num_bytes)
    assert (first.is_aborted, second.is_aborted) == (True, False)


def test_a_connection_that_holds_little_stays() -> None:
    holdings, small, large = Holdings(LIMIT), Wire(), [Wire() for _ in range(4)]
    holdings.hold(small, "client", 1)
    for wire in large:
        holdings.hold(wire, "client", 30)
    assert [wire.is_aborted for wire in (small, *large)] == [False, True, False, False, False]


def test_the_client_with_most_is_disconnected() -> None:
    holdings, other, many = Holdings(LIMIT), Wire(), [Wire() for _ in range(3)]
    holdings.hold(other, "alice", 35)
    for wire in many:
        holdings.hold(wire, "mallory", 25)
    assert [wire.is_aborted for wire in (other, *many)] == [False, True, False, False]
    holdings.hold(huge := Wire(), "mallory", LIMIT + 1)
    assert (other.is_aborted, huge.is_aborted) == (False, True)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 60)), max_size=60))
def test_what_is_held_never_exceeds_the_limit(steps: list[tuple[int, int]]) -> None:
    """A negative number stands for a connection that holds nothing any more."""
    holdings, wires, held = Holdings(LIMIT), [Wire() for _ in range(6)], dict[int, int]()
    for number, num_bytes in steps:
        wire = wires[number]
        wire.is_aborted = False
        if num_bytes < 0:
            holdings.forget(wire)
            held.pop(number, None)
        else:
            holdings.hold(wire, f"client {number % 3}", num_bytes)
            held[number] = num_bytes
        held = {each: size for each, size in held.items() if not wires[each].is_aborted}
        assert holdings.total == sum(held.values()) <= LIMIT
