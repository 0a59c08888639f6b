"""Many seeds, one after the other, in one thread."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.simulator.draw import draw_scenario
from cluster.simulator.simulation import Simulation


@dataclass(slots=True)
class Campaign:
    """What a number of seeds showed together."""

    num_seeds: int = 0
    num_requests: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """Faults and hazards that came true, by kind."""
    moved: Counter[str] = field(default_factory=Counter)
    """Pages that went from tier to tier, by kind."""
    ends: Counter[str] = field(default_factory=Counter)
    """Requests by how they ended."""
    violations: dict[int, str] = field(default_factory=dict)
    """The broken promise of each failing seed."""

    def run(self, seeds: Iterable[int]) -> None:
        """Simulate the scenario of each seed."""
        for seed in seeds:
            scenario = draw_scenario(seed)
            outcome = Simulation(scenario).run()
            self.num_seeds += 1
            self.num_requests += len(scenario.asks)
            self.faults += outcome.happened
            self.moved += outcome.moved
            self.ends += outcome.ends
            if outcome.violation is not None:
                self.violations[seed] = outcome.violation
