"""World of simulated processes, and the processes in it: they listen, send, wait, pause, and die."""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from random import Random

from cluster.simulator.memory import Memory, Text, Tickets
from cluster.simulator.network import Network
from cluster.simulator.scenario import Hazards, Scenario, Shape
from cluster.simulator.timeline import Event, Timeline, Trace
from cluster.spec.ids import Room
from cluster.spec.messages import Message, Submit


@dataclass(slots=True)
class Surroundings:
    """World around one simulation's processes."""

    scenario: Scenario
    trace: Trace
    timeline: Timeline
    random: Random
    network: Network
    tickets: Tickets = field(default_factory=Tickets)
    memories: dict[str, Memory] = field(default_factory=dict)
    """Memories by session."""
    storage: dict[tuple[bytes, str, int, int], bytes] = field(default_factory=dict)
    """KV of stored pages by key, head and layer."""
    texts: dict[Room, Text] = field(default_factory=dict)
    submits: dict[Room, Submit] = field(default_factory=dict)
    """Submits of all requests ever sent."""
    happened: Counter[str] = field(default_factory=Counter)
    """Faults and hazards that occurred."""
    was_quarantined: bool = False
    """True if a replica took no requests for a while, since too many of its pages were not proven free."""
    moved: Counter[str] = field(default_factory=Counter)
    """Pages of tier jobs, by kind, once for each rank."""

    def text_of(self, room: Room) -> Text:
        if room not in self.texts:
            self.texts[room] = Text(bytes(self.submits[room].prompt_ids))
        return self.texts[room]

    @property
    def shape(self) -> Shape:
        return self.scenario.shape

    @property
    def hazards(self) -> Hazards:
        return self.scenario.hazards

    def now_s(self) -> float:
        return self.timeline.now_s()

    def after(self, delay_s: float, event: Event) -> None:
        self.timeline.after(delay_s, event)


def make_surroundings(scenario: Scenario, traced: bool) -> Surroundings:
    timeline, random = Timeline(), Random(scenario.seed)
    trace = Trace(timeline, traced)
    network = Network(timeline, random, scenario.hazards, trace)
    return Surroundings(scenario=scenario, trace=trace, timeline=timeline, random=random, network=network)


class Process(ABC):
    """Process with an address."""

    def __init__(self, around: Surroundings, address: str) -> None:
        self.around = around
        self.address = address
        self.is_dead = False
        self._is_paused = False
        self._waiting: list[Event] = []
        """Events postponed until it runs again."""
        around.network.listen(address, self.take)

    @abstractmethod
    def take(self, message: Message) -> None:
        """Handle an arrived message."""

    def send(self, address: str, message: Message) -> None:
        self.around.network.send(self.address, address, message)

    def when_running(self, event: Event) -> None:
        """Run an event now, or when the process is no longer paused; never if it is dead."""
        if self._is_paused:
            self._waiting.append(event)
        elif not self.is_dead:
            event()

    def after(self, delay_s: float, event: Event) -> None:
        self.around.after(delay_s, partial(self.when_running, event))

    def every(self, interval_s: float, event: Event) -> None:
        self.when_running(event)
        if not self.is_dead:
            self.around.after(interval_s, partial(self.every, interval_s, event))

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        """Run the postponed events and continue."""
        self._is_paused = False
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            self.when_running(event)

    def kill(self) -> None:
        """Die: no scheduled event runs."""
        self.around.trace.add(self.address, "dies")
        self.is_dead = True
        self.around.network.unlisten(self.address)
        self.around.network.end_sender(self.address)
