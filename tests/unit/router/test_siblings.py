"""Router processes that share a port: loads, limits and figures are those of all of them."""

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from cluster.spec.ids import Incarnation, ReplicaId, Room, router_names
from cluster.spec.worker_spec import RouterPlace
from router.errors import KeyLimitError
from router.key_limits import KeyLimits, Limit
from router.load import LoadBook
from router.measures import Measures
from router.policies.candidate import Load
from router.siblings import Figures, Now, Siblings
from tests.fakes.bootstrap import peer_of

PEER = peer_of("decode-0")


class Clock:
    """Time by hand."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s


class Process:
    """The parts of a router process that share."""

    def __init__(self, place: RouterPlace, clock: Clock) -> None:
        self.siblings = Siblings(place, clock)
        self.load = LoadBook(lambda: self.siblings.loads)
        self.limits = KeyLimits(clock, self.siblings)
        self.num_waiting = 0
        self.timed: dict[Room, str] = {}
        self.measures = Measures()
        self.measures.others = lambda: (figures.told for figures in self.siblings.figures())
        self.count = self.measures.count("requests", "Help.", "outcome")
        self.siblings.watch(
            lambda: Now(3, self.num_waiting, self.load.lines(), self.limits.told(), self.timed),
            lambda: Figures(self.measures.told(), [{"ended": 1.0}]),
        )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board() -> Iterator[str]:
    descriptor = os.memfd_create("board")
    yield f"/proc/{os.getpid()}/fd/{descriptor}"
    os.close(descriptor)


def process(board: str, index: int, clock: Clock, num: int = 2) -> Process:
    name = router_names(num)[index]
    return Process(RouterPlace(name=name, index=index, num_processes=num, board=board), clock)


@pytest.fixture
def processes(board: str, clock: Clock) -> list[Process]:
    return [process(board, index, clock) for index in range(2)]


def test_names_are_those_of_the_first_and_numbers() -> None:
    assert router_names(3) == ["router", "router-1", "router-2"]


def test_load_elsewhere_is_load(processes: list[Process]) -> None:
    ours, theirs = processes
    ours.load.add(PEER, 10)
    theirs.load.add(PEER, 5)
    assert ours.load.of(PEER) == Load(num_requests=1, num_tokens=10)
    theirs.siblings.tell()
    assert ours.load.of(PEER) == Load(num_requests=2, num_tokens=15)
    assert ours.load.lines() == {(ReplicaId("decode-0"), Incarnation(1)): Load(num_requests=1, num_tokens=10)}
    theirs.load.remove(PEER, 5)
    theirs.siblings.tell()
    assert ours.load.of(PEER) == Load(num_requests=1, num_tokens=10)
    assert ours.siblings.num_open == 3


def test_open_requests_of_a_key_count_wherever_they_are(processes: list[Process]) -> None:
    limit = Limit(2, None)
    with ExitStack() as stack:
        for each in processes:
            stack.enter_context(each.limits.open("ann", limit))
        for each in processes:
            with (
                pytest.raises(KeyLimitError, match="ann: 2 requests are open; allowed: 2"),
                each.limits.open("ann", limit),
            ):
                pass
        with processes[0].limits.open("bob", limit):
            pass
    for each in processes:
        with each.limits.open("ann", limit):
            pass


def test_tokens_of_a_key_count_wherever_they_were_used(board: str, processes: list[Process], clock: Clock) -> None:
    limit = Limit(None, 60)
    for each in processes:
        with each.limits.open("ann", limit):
            each.limits.spend("ann", limit, 35)
    for each in processes:
        with pytest.raises(KeyLimitError, match="used up"), each.limits.open("ann", limit):
            pass
    latest = process(board, 1, clock)
    latest.siblings.tell()
    for each in (processes[0], latest):
        with pytest.raises(KeyLimitError, match="used up"), each.limits.open("ann", limit):
            pass
    clock.time_s += 11
    for each in (processes[0], latest):
        with each.limits.open("ann", limit):
            pass


def test_what_a_dead_process_had_open_does_not_count_for_ever(processes: list[Process], clock: Clock) -> None:
    ours, theirs = processes
    limit = Limit(1, None)
    with theirs.limits.open("ann", limit):
        theirs.load.add(PEER, 5)
        theirs.siblings.look()
        ours.siblings.look()
        clock.time_s += 2.9
        ours.siblings.look()
        with pytest.raises(KeyLimitError), ours.limits.open("ann", limit):
            pass
        assert ours.load.of(PEER).num_tokens == 5
        clock.time_s += 0.2
        ours.siblings.look()
        with ours.limits.open("ann", limit):
            pass
        assert ours.load.of(PEER) == Load()
        theirs.siblings.look()
        ours.siblings.look()
        assert ours.load.of(PEER).num_tokens == 5, "it only stood still"


def test_timed_requests_are_known_to_others_while_their_process_lives(processes: list[Process], clock: Clock) -> None:
    ours, theirs = processes
    theirs.timed = {Room(7): "theirs"}
    for each in (theirs, ours):
        each.siblings.look()
    assert ours.siblings.timed == {7: "theirs"}
    assert theirs.siblings.timed == {}
    clock.time_s += 3.1
    ours.siblings.look()
    assert ours.siblings.timed == {}


def test_an_order_to_pause_holds_for_all_and_for_those_that_come_later(
    board: str, processes: list[Process], clock: Clock
) -> None:
    processes[0].siblings.is_paused = True
    assert processes[1].siblings.is_paused
    assert process(board, 1, clock).siblings.is_paused
    processes[1].siblings.is_paused = False
    assert not processes[0].siblings.is_paused


def test_figures_are_added_up(processes: list[Process]) -> None:
    for each, amount in zip(processes, (1, 10), strict=True):
        each.count.add(amount, "finished")
        each.siblings.look()
    processes[1].count.add(100, "failed")
    processes[1].num_waiting = 4
    for _ in range(30):
        processes[1].siblings.look()
    (family,) = processes[0].measures.collect()
    assert {sample.labels["outcome"]: sample.value for sample in family.samples} == {"finished": 11, "failed": 100}
    assert processes[0].siblings.num_waiting == 4


def test_one_alone_has_no_memory_to_share() -> None:
    alone = Siblings(RouterPlace())
    alone.look()
    assert alone.is_alone
    assert (alone.num_open, alone.num_waiting, dict(alone.loads), list(alone.figures())) == (0, 0, {}, [])
    alone.is_paused = True
    assert alone.is_paused
