"""Requests wait for their grammars before they reach the scheduler, and their grammars stay while they are open."""

from concurrent.futures import Future
from typing import Any

import pytest

from cluster.grammar import Compiled
from cluster.spec.ids import Room
from cluster.spec.messages import Message, Submit
from cluster.spec.sampling import Sampling
from tests.unit.workers.test_following import submit_of
from workers.loop.grammar_gate import GrammarGate

SECONDS = {"simple": 0.001, "one": 1.5, "two": 1.5, "three": 1.5}


class Leader:
    def __init__(self) -> None:
        self.open: list[Room] = []
        self.refused: list[Room] = []

    def on_message(self, message: Message, now_s: float) -> None:  # noqa: ARG002
        assert isinstance(message, Submit)
        self.open.append(message.room)

    def refuse(self, submit: Submit, reason: str) -> None:
        assert reason == "too many grammars are in use; try again"
        self.refused.append(submit.room)

    def has(self, room: Room) -> bool:
        return room in self.open


class Grammars:
    """Grammars that are compiled when the test says so."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[Compiled]] = {}

    def prepare(self, grammar: str, tenant: str = "") -> Future[Compiled]:  # noqa: ARG002
        return self.futures.setdefault(grammar, Future())

    def finish(self, grammar: str) -> None:
        matcher: Any = None
        self.futures[grammar].set_result(Compiled(matcher, SECONDS[grammar]))


@pytest.fixture
def leader() -> Leader:
    return Leader()


@pytest.fixture
def grammars() -> Grammars:
    return Grammars()


@pytest.fixture
def gate(leader: Leader, grammars: Grammars) -> GrammarGate:
    given: Any = grammars
    of: Any = leader
    return GrammarGate(given, of)


def submit(gate: GrammarGate, room: int, grammar: str = "") -> None:
    gate.submit(submit_of(room, Sampling(grammar=grammar)), 0.0)


def test_requests_are_passed_on_once_they_are_compiled(gate: GrammarGate, leader: Leader, grammars: Grammars) -> None:
    submit(gate, 1, "one")
    submit(gate, 2, "two")
    submit(gate, 3)
    assert leader.open == [3]
    grammars.finish("two")
    gate.pass_on(0.0)
    assert (leader.open, gate.num_waiting) == ([3, 2], 1)
    grammars.finish("one")
    gate.pass_on(0.0)
    assert (leader.open, gate.num_waiting) == ([3, 2, 1], 0)


def test_grammars_of_open_requests_are_held_and_limited(gate: GrammarGate, leader: Leader, grammars: Grammars) -> None:
    """Two requests may have the same grammar."""
    for room, grammar in enumerate(["one", "one", "two", "three", "simple"]):
        submit(gate, room, grammar)
    for grammar in SECONDS:
        grammars.finish(grammar)
    gate.pass_on(0.0)
    assert (leader.open, leader.refused) == ([0, 1, 2, 4], [3])
    assert set(gate._held) == {0, 1, 2, 4}
    leader.open.remove(Room(2))
    gate.release()
    submit(gate, 5, "three")
    assert leader.open[-1] == 5
    assert set(gate._held) == {0, 1, 4, 5}


def test_a_grammar_that_cannot_be_used_is_left_to_the_leader(
    gate: GrammarGate, leader: Leader, grammars: Grammars
) -> None:
    submit(gate, 1, "one")
    grammars.futures["one"].set_exception(ValueError("a bad grammar"))
    gate.pass_on(0.0)
    assert leader.open == [1]
