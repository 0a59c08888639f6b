"""From a scenario that breaks a promise to a smaller one that does, too: what is not needed for it is left out."""

from collections.abc import Iterator
from dataclasses import fields, replace

from cluster.simulator.scenario import Hazards, Scenario, Shape
from cluster.simulator.simulation import Outcome, Simulation

_MAX_RUNS = 400
_SIMPLE = Shape()
_CALM = Hazards()


def shrink(scenario: Scenario) -> tuple[Scenario, Outcome]:
    """The smallest scenario that was found, and what it shows, with its trace; ``scenario`` breaks a promise."""
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
    """Scenarios that lack one thing, those that lack most of them first."""
    asks, faults = scenario.asks, scenario.faults
    if len(asks) > 2:
        yield replace(scenario, asks=asks[: len(asks) // 2])
        yield replace(scenario, asks=asks[len(asks) // 2 :])
    if len(asks) > 1:
        for number in range(len(asks)):
            yield replace(scenario, asks=asks[:number] + asks[number + 1 :])
    for number in range(len(faults)):
        yield replace(scenario, faults=faults[:number] + faults[number + 1 :])
    for field in fields(Hazards):
        calm = getattr(_CALM, field.name)
        if getattr(scenario.hazards, field.name) != calm:
            yield replace(scenario, hazards=replace(scenario.hazards, **{field.name: calm}))
    yield from _simpler_shapes(scenario)


def _simpler_shapes(scenario: Scenario) -> Iterator[Scenario]:
    """With one property of the cluster as in the simplest one; replicas that faults name stay."""
    named = {name for fault in scenario.faults for name in (fault.member, fault.other)}
    for name in (
        "num_prefill",
        "num_decode",
        "tiers",
        "ownership",
        "cp",
        "dp",
        "decode_dp",
        "mode",
        "page_filter",
        "settle_s",
        "reuses_addresses",
    ):
        simple = getattr(_SIMPLE, name)
        is_named = named & {"prefill-1"} if name == "num_prefill" else named & {"decode-1"}
        if getattr(scenario.shape, name) != simple and not (name.startswith("num_") and is_named):
            yield replace(scenario, shape=replace(scenario.shape, **{name: simple}))
