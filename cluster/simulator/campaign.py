"""Runs of many seeds, and minimization of a failing scenario."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from cluster.simulator.draw import draw_scenario
from cluster.simulator.scenario import Hazards, Scenario, Shape
from cluster.simulator.simulation import Outcome, Simulation
from cluster.spec.ids import Role

_MAX_RUNS = 400
T = TypeVar("T", Hazards, Shape)


@dataclass(slots=True)
class Campaign:
    num_seeds: int = 0
    num_requests: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """Number of faults and hazards that occurred, by kind."""
    moved: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    violations: dict[int, str] = field(default_factory=dict)

    def run(self, seeds: Iterable[int]) -> None:
        for seed in seeds:
            scenario = draw_scenario(seed)
            outcome = Simulation(scenario).run()
            self.num_seeds += 1
            self.num_requests += len(scenario.requests)
            self.faults += outcome.happened
            self.moved += outcome.moved
            self.ends += outcome.ends
            if outcome.violation is not None:
                self.violations[seed] = outcome.violation


def shrink(scenario: Scenario) -> tuple[Scenario, Outcome]:
    """Return a smaller scenario that still fails, and its traced outcome."""
    num_runs, is_smaller = 0, True
    longest_s = 2 * Simulation(scenario).run().virtual_s  # a smaller scenario can fail much later
    while is_smaller and num_runs < _MAX_RUNS:
        is_smaller = False
        for candidate in _smaller(scenario):
            num_runs += 1
            outcome = Simulation(candidate).run()
            if outcome.violation is not None and outcome.virtual_s <= longest_s:
                scenario, is_smaller = candidate, True
                break
    return scenario, Simulation(scenario, traced=True).run()


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yield scenarios with one reduction each, the largest reductions first."""
    requests, faults = scenario.requests, scenario.faults
    if len(requests) > 2:
        yield replace(scenario, requests=requests[: len(requests) // 2])
        yield replace(scenario, requests=requests[len(requests) // 2 :])
    if len(requests) > 1:
        for number in range(len(requests)):
            yield replace(scenario, requests=requests[:number] + requests[number + 1 :])
    for number in range(len(faults)):
        yield replace(scenario, faults=faults[:number] + faults[number + 1 :])
    for hazards in _resets(scenario.hazards):
        yield replace(scenario, hazards=hazards)
    # The requests depend on the pool sizes, and the flip hazard on ``verify``.
    kept = {"prefill_pages", "decode_pages", "verify"}
    named = {name for fault in faults for name in (fault.member, fault.other)}
    kept |= {f"num_{role}" for role in Role if f"{role}-1" in named}
    for shape in _resets(scenario.shape, kept):
        yield replace(scenario, shape=shape)


def _resets(settings: T, kept: Collection[str] = ()) -> Iterator[T]:
    """Yield the settings with one field reset to its default."""
    default = type(settings)()
    for setting in fields(settings):
        name, value = setting.name, getattr(default, setting.name)
        if name not in kept and getattr(settings, name) != value:
            yield replace(settings, **{name: value})
