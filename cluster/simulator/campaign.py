"""Runs of many seeds, and the search for a smaller scenario that still fails."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace

from cluster.simulator.draw import draw_scenario
from cluster.simulator.scenario import Hazards, Scenario, Shape
from cluster.simulator.simulation import Outcome, Simulation

_MAX_RUNS = 400
_SIMPLE = Shape()
_CALM = Hazards()


@dataclass(slots=True)
class Campaign:
    """Totals over a number of seeds."""

    num_seeds: int = 0
    num_requests: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """Number of faults and hazards that occurred, by kind."""
    moved: Counter[str] = field(default_factory=Counter)
    """Number of pages moved between tiers, by kind, and of early sends."""
    ends: Counter[str] = field(default_factory=Counter)
    """Number of requests by end."""
    violations: dict[int, str] = field(default_factory=dict)
    """Broken promise of each failing seed."""

    def run(self, seeds: Iterable[int]) -> None:
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


def shrink(scenario: Scenario) -> tuple[Scenario, Outcome]:
    """Return the smallest failing scenario found by reducing ``scenario``, and its outcome with a trace."""
    num_runs = 0
    is_smaller = True
    while is_smaller and num_runs < _MAX_RUNS:
        is_smaller = False
        for candidate in _smaller(scenario):
            num_runs += 1
            if Simulation(candidate).run().violation is not None:
                scenario, is_smaller = candidate, True
                break
    return scenario, Simulation(scenario, traced=True).run()


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yield scenarios with one thing less, largest reductions first."""
    asks, faults = scenario.asks, scenario.faults
    if len(asks) > 2:
        yield replace(scenario, asks=asks[: len(asks) // 2])
        yield replace(scenario, asks=asks[len(asks) // 2 :])
    if len(asks) > 1:
        for number in range(len(asks)):
            yield replace(scenario, asks=asks[:number] + asks[number + 1 :])
    for number in range(len(faults)):
        yield replace(scenario, faults=faults[:number] + faults[number + 1 :])
    for hazard in fields(Hazards):
        calm = getattr(_CALM, hazard.name)
        if getattr(scenario.hazards, hazard.name) != calm:
            yield replace(scenario, hazards=replace(scenario.hazards, **{hazard.name: calm}))
    yield from _simpler_shapes(scenario)


def _simpler_shapes(scenario: Scenario) -> Iterator[Scenario]:
    """Yield scenarios with one property reset to its default; replicas that faults name are kept."""
    named = {name for fault in scenario.faults for name in (fault.member, fault.other)}
    for name in (
        "num_prefill",
        "num_decode",
        "tiers",
        "ownership",
        "cp",
        "dp",
        "tp",
        "pp",
        "decode_dp",
        "decode_tp",
        "decode_pp",
        "num_layers",
        "num_kv_heads",
        "mode",
        "settle_s",
        "reuses_addresses",
    ):
        simple = getattr(_SIMPLE, name)
        is_named = named & {"prefill-1"} if name == "num_prefill" else named & {"decode-1"}
        if getattr(scenario.shape, name) != simple and not (name.startswith("num_") and is_named):
            yield replace(scenario, shape=replace(scenario.shape, **{name: simple}))
