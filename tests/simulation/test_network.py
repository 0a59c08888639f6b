"""The simulated network delivers and loses the same messages as ZeroMQ over TCP."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from cluster.simulator.environment import EventQueue, Network, Trace
from cluster.simulator.scenario import Hazards
from cluster.spec.ids import Incarnation, Room
from cluster.spec.messages import Cancel, Message


class Wire:
    def __init__(self, seed: int, hazards: Hazards | None = None) -> None:
        self.event_queue = EventQueue()
        trace = Trace(self.event_queue, is_on=False)
        self.network = Network(self.event_queue, Random(seed), hazards or Hazards(), trace)
        self.received: list[int] = []

    def listen(self) -> None:
        self.network.listen("b/in", self._take)

    def send(self, numbers: range, sender: str = "a/out") -> None:
        for number in numbers:
            self.network.send(sender, "b/in", Cancel(room=Room(number), incarnation=Incarnation(1)))

    def run(self) -> list[int]:
        while self.event_queue.step():
            continue
        return self.received

    def _take(self, message: Message) -> None:
        assert isinstance(message, Cancel)
        self.received.append(message.room)


@given(seed=st.integers(0, 2**32), count=st.integers(0, 30))
def test_messages_of_one_sender_arrive_in_order(seed: int, count: int) -> None:
    wire = Wire(seed)
    wire.listen()
    wire.send(range(count))
    wire.send(range(100, 100 + count), sender="c/out")
    received = wire.run()
    assert [number for number in received if number < 100] == list(range(count))
    assert [number for number in received if number >= 100] == list(range(100, 100 + count))


@given(seed=st.integers(0, 2**32), count=st.integers(0, 30))
def test_undeliverable_messages_wait(seed: int, count: int) -> None:
    wire = Wire(seed)
    wire.network.cut(("a", "b"))
    wire.send(range(count))
    assert wire.run() == []
    wire.listen()
    assert wire.run() == []
    wire.network.heal(("a", "b"))
    assert wire.run() == list(range(count))


def test_a_cut_direction_leaves_the_other_one() -> None:
    wire = Wire(0)
    wire.listen()
    wire.network.cut(("b", "a"), ("b", "a"))
    wire.send(range(3))
    assert wire.run() == [0, 1, 2]
    wire.network.heal(("b", "a"))
    assert wire.network.is_cut("b", "a"), "one fault is still open"
    assert wire.network.is_partitioned("a", "b")


@given(seed=st.integers(0, 2**32), count=st.integers(0, 30))
def test_a_dead_sender_loses_the_last_messages_only(seed: int, count: int) -> None:
    wire = Wire(seed)
    wire.listen()
    wire.send(range(count))
    wire.network.remove("a/out")
    received = wire.run()
    assert received == list(range(len(received)))


def test_queued_messages_die_with_their_sender() -> None:
    wire = Wire(0)
    wire.send(range(3))
    wire.run()
    wire.network.remove("a/out")
    wire.listen()
    assert wire.run() == []


@given(seed=st.integers(0, 2**32))
def test_hazards_occur_between_machines_only(seed: int) -> None:
    worst = Hazards(drop=0.5, duplicate=0.5, reorder=0.5)
    wire = Wire(seed, worst)
    wire.listen()
    wire.send(range(100))
    assert wire.run() != list(range(100))
    assert set(wire.network.happened) == {"drop", "duplicate", "reorder"}
    inside = Wire(seed, worst)
    inside.listen()
    inside.send(range(100), sender="b/out")
    assert inside.run() == list(range(100))
