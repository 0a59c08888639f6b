"""World of simulated processes: time, randomness, the network, all memories, and what the checks see."""

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
        """Return the tokens of a request."""
        if room not in self.texts:
            self.texts[room] = Text(bytes(self.submits[room].prompt_ids))
        return self.texts[room]

    @property
    def shape(self) -> Shape:
        """Shape of the cluster."""
        return self.scenario.shape

    @property
    def hazards(self) -> Hazards:
        """Rates of failing messages, writes and tier jobs."""
        return self.scenario.hazards

    def now_s(self) -> float:
        """Virtual seconds."""
        return self.timeline.now_s()

    def after(self, delay_s: float, event: Event) -> None:
        """Schedule an event."""
        self.timeline.after(delay_s, event)


def make_surroundings(scenario: Scenario, traced: bool) -> Surroundings:
    """Create the world of a scenario at time 0."""
    timeline, random = Timeline(), Random(scenario.seed)
    trace = Trace(timeline, traced)
    network = Network(timeline, random, scenario.hazards, trace)
    return Surroundings(scenario=scenario, trace=trace, timeline=timeline, random=random, network=network)
