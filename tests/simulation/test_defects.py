"""The simulator bites: each defect, put into the real code, breaks a promise within some seeds."""

import re
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from cluster.simulator.draw import draw_mild, draw_scenario
from cluster.simulator.scenario import Fault, FaultKind, Hazards, Scenario, TierShape
from cluster.simulator.simulation import Simulation
from cluster.spec.hicache_config import PrefetchPolicy, WritePolicy
from tests.simulation import defects

MAX_SEEDS = 600

FOREIGN_WRITE = r"has no ticket|is free or shared"
EARLY_READ = r"is read before|wrong tokens"
NEVER_ENDS = r"never came to an end"
FAILS_IN_CALM = r"nothing went wrong"
FAILS_IN_MILD = r"a replica of each role was spared"
NOT_TOLD = r"not told so"
FOREIGN_PAGE = rf"{EARLY_READ}|under the key of another|no sequence holds alone|nobody has filled"

Weather = Callable[[Scenario], Scenario]


def as_drawn(scenario: Scenario) -> Scenario:
    return scenario


def mild(scenario: Scenario) -> Scenario:
    return draw_mild(Random(scenario.seed), replace(scenario, hazards=Hazards()))


def repeated_messages(scenario: Scenario) -> Scenario:
    return replace(scenario, faults=(), hazards=Hazards(duplicate=0.3, slowness=10.0))


def late_words(scenario: Scenario) -> Scenario:
    return replace(scenario, faults=(), hazards=Hazards(stale=0.5, slowness=10.0))


def dying_ranks(scenario: Scenario) -> Scenario:
    shape = replace(scenario.shape, cp=4, prefill_pages=24, settle_s=2.0)
    faults = [Fault(kind=FaultKind.KILL, at_s=at_s, member="prefill-0", rank=at_s) for at_s in (1, 2, 3)]
    return replace(scenario, shape=shape, faults=tuple(faults), hazards=Hazards(slowness=30.0))


def lost_machine(scenario: Scenario) -> Scenario:
    fault = Fault(kind=FaultKind.LOSE_MACHINE, at_s=4, member="prefill-0", duration_s=10.0)
    return replace(scenario, faults=(fault,), hazards=Hazards(slowness=30.0))


def disorder(scenario: Scenario) -> Scenario:
    return replace(scenario, hazards=Hazards(duplicate=0.2, reorder=0.2, slowness=10.0))


def cold_tiers(scenario: Scenario) -> Scenario:
    """Small pools, so that pages come back from below."""
    tiers = TierShape(host_pages=12, write=WritePolicy.WRITE_THROUGH, prefetch=PrefetchPolicy.WAIT_COMPLETE)
    shape = replace(scenario.shape, prefix_cache=True, tiers=tiers)
    return replace(scenario, shape=shape, faults=(), hazards=Hazards(fail_move=0.1, slow_move=True))


@pytest.mark.parametrize(
    ("defect", "weather", "promise"),
    [
        (defects.free_on_timeout, as_drawn, f"{FOREIGN_WRITE}|{EARLY_READ}"),
        (defects.skip_the_generation_check, late_words, FOREIGN_WRITE),
        (defects.count_the_same_sender_twice, repeated_messages, EARLY_READ),
        (defects.reuse_a_room, as_drawn, FAILS_IN_CALM),
        (defects.ignore_the_incarnation, dying_ranks, FOREIGN_WRITE),
        (defects.drop_the_drain_ack, as_drawn, NEVER_ENDS),
        (defects.miscount_pages, as_drawn, FAILS_IN_CALM),
        (defects.restart_one_rank_alone, dying_ranks, "of which it was never told|has no KV|" + NEVER_ENDS),
        (defects.free_source_pages_early, as_drawn, f"{FOREIGN_WRITE}|{EARLY_READ}"),
        (defects.let_no_bytes_settle, dying_ranks, FOREIGN_WRITE),
        (defects.take_silence_for_proof, lost_machine, FOREIGN_WRITE),
        (defects.keep_no_tombstones, disorder, FOREIGN_WRITE),
        (defects.take_a_page_id_for_its_place, as_drawn, EARLY_READ),
        (defects.continue_at_output_0, mild, EARLY_READ),
        (defects.begin_anew_behind_given_tokens, mild, EARLY_READ),
        (defects.retry_in_the_same_room, mild, FAILS_IN_MILD),
        (defects.retry_where_it_failed, mild, FAILS_IN_MILD),
        (defects.cancel_no_other_leg, mild, NOT_TOLD),
        (defects.end_an_order_with_the_first_answer, cold_tiers, FOREIGN_PAGE),
        (defects.keep_copies_of_pages_that_were_given_up, cold_tiers, FOREIGN_PAGE),
        (defects.believe_failed_copies, cold_tiers, FOREIGN_PAGE),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_defect_is_caught(
    defect: Callable[[pytest.MonkeyPatch], None], weather: Weather, promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    for seed in range(MAX_SEEDS):
        violation = Simulation(weather(draw_scenario(seed))).run().violation
        if violation is not None:
            break
    else:
        pytest.fail(f"{MAX_SEEDS} seeds saw nothing of it")
    assert re.search(promise, violation), violation


@pytest.mark.parametrize(
    "weather", [mild, repeated_messages, late_words, dying_ranks, lost_machine, disorder, cold_tiers]
)
def test_without_a_defect_the_same_weather_breaks_nothing(weather: Weather) -> None:
    for seed in range(25):
        assert Simulation(weather(draw_scenario(seed))).run().violation is None, seed
