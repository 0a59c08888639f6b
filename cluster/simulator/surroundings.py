"""The world of simulated processes: time, chance, the network, all memories, and what the checks see."""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from cluster.simulator.memory import Memory, Text, Tickets
from cluster.simulator.network import Network
from cluster.simulator.scenario import Hazards, Scenario, Shape
from cluster.simulator.timeline import Event, Timeline, Trace
from cluster.spec.ids import Room
from cluster.spec.messages import Submit


@dataclass(slots=True)
class Surroundings:
    """One simulation's world around its processes."""

    scenario: Scenario
    trace: Trace
    timeline: Timeline
    random: Random
    network: Network
    tickets: Tickets = field(default_factory=Tickets)
    memories: dict[str, Memory] = field(default_factory=dict)
    """By session."""
    storage: dict[tuple[bytes, str, int, int], bytes] = field(default_factory=dict)
    """KV of stored pages by key, head and layer."""
    texts: dict[Room, Text] = field(default_factory=dict)
    submits: dict[Room, Submit] = field(default_factory=dict)
    """Every request that was ever sent."""
    happened: Counter[str] = field(default_factory=Counter)
    """Faults and hazards that came true."""
    was_quarantined: bool = False
    """A replica took no requests for a while, since too many of its pages were not proven free."""
    moved: Counter[str] = field(default_factory=Counter)
    """Pages of tier jobs, by kind, once for each rank."""

    def text_of(self, room: Room) -> Text:
        """The tokens of a request."""
        if room not in self.texts:
            self.texts[room] = Text(bytes(self.submits[room].prompt_ids))
        return self.texts[room]

    @property
    def shape(self) -> Shape:
        """The cluster's shape."""
        return self.scenario.shape

    @property
    def hazards(self) -> Hazards:
        """How often messages, writes and tier jobs go wrong."""
        return self.scenario.hazards

    def now_s(self) -> float:
        """Virtual seconds."""
        return self.timeline.now_s()

    def after(self, delay_s: float, event: Event) -> None:
        """Let something happen later."""
        self.timeline.after(delay_s, event)


def make_surroundings(scenario: Scenario, traced: bool) -> Surroundings:
    """Fresh ones, at time 0."""
    timeline, random = Timeline(), Random(scenario.seed)
    trace = Trace(timeline, traced)
    network = Network(timeline, random, scenario.hazards, trace)
    return Surroundings(scenario=scenario, trace=trace, timeline=timeline, random=random, network=network)
