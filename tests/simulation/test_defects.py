"""Each planted defect breaks a promise within some seeds."""

import re
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from cluster.simulator.draw import draw_mild, draw_scenario
from cluster.simulator.scenario import PAGE_SIZE, Fault, FaultKind, Hazards, Scenario, TierShape
from cluster.simulator.simulation import Simulation
from cluster.spec.hicache_config import PrefetchPolicy, WritePolicy
from cluster.spec.registry import KvOwnership, TransferMode, Verify
from tests.simulation import defects, layer_defects, router_defects

MAX_SEEDS = 600

FOREIGN_WRITE = r"has no ticket|is free or shared|from another rank"
EARLY_READ = r"(?:is|are) read before|wrong tokens"
NEVER_ENDS = r"still open"
DEADLINE = r"a deadline ended"
FAILS_IN_CALM = r"nothing failed"
FAILS_IN_MILD = r"a replica of each role had no fault"
TAKEN_FOR_SILENT = r"is taken for silent, but has sent heartbeats"
NOT_CANCELLED = r"no Cancel was sent to"
OTHER_START = r"for another incarnation of this replica"
FOREIGN_PAGE = rf"{EARLY_READ}|under the key of another|is not held by exactly one sequence|before it is filled"

Conditions = Callable[[Scenario], Scenario]


def unchanged(scenario: Scenario) -> Scenario:
    return scenario


def calm(scenario: Scenario) -> Scenario:
    return replace(scenario, faults=(), hazards=Hazards())


def commands(scenario: Scenario) -> Scenario:
    """An operator adds a replica of each role and removes it again."""
    times = [(1, "prefill-1"), (2, "decode-1"), (5, "prefill-0"), (7, "decode-0")]
    faults = tuple(Fault(kind=FaultKind.SCALE, at_s=at_s, member=name) for at_s, name in times)
    shape = replace(scenario.shape, num_prefill=1, num_decode=1)
    return replace(calm(scenario), shape=shape, faults=faults)


def mild(scenario: Scenario) -> Scenario:
    return draw_mild(Random(scenario.seed), replace(scenario, hazards=Hazards()))


def repeated_messages(scenario: Scenario) -> Scenario:
    """Two ranks send the same number of pages, and one is often later."""
    shape = replace(
        scenario.shape,
        cp=2,
        prefill_pages=24,
        decode_pages=24,
        mode=TransferMode.ALL_RANKS,
        ownership=KvOwnership.REPLICATED,
    )
    requests = tuple(replace(each, prompt=(each.prompt * 16)[: 4 * PAGE_SIZE]) for each in scenario.requests)
    hazards = Hazards(duplicate=0.5, slow_write=0.3, slowness=10.0)
    return replace(scenario, shape=shape, requests=requests, faults=(), hazards=hazards)


def dying_streams(scenario: Scenario) -> Scenario:
    """Decode replicas die one after another."""
    shape = scenario.shape
    # Room for the longer answers.
    prefill_pages, decode_pages = shape.prefill_pages + 8 * shape.cp, shape.decode_pages + 8
    shape = replace(shape, num_prefill=2, num_decode=2, prefill_pages=prefill_pages, decode_pages=decode_pages)
    requests = tuple(replace(each, max_tokens=12, patience_s=None) for each in scenario.requests)
    faults = tuple(Fault(kind=FaultKind.KILL, at_s=at_s, member=f"decode-{at_s % 2}") for at_s in (2, 5, 8))
    return replace(scenario, shape=shape, requests=requests, faults=faults, hazards=Hazards(slowness=10.0))


def late_messages(scenario: Scenario) -> Scenario:
    return replace(scenario, faults=(), hazards=Hazards(stale=0.5, slowness=10.0))


def restarts_in_place(scenario: Scenario) -> Scenario:
    """Replicas die and restart at the same addresses."""
    shape = replace(scenario.shape, num_prefill=1, num_decode=1, reuses_addresses=True)
    requests = tuple(replace(each, at_s=1 + each.at_s / 4, patience_s=None) for each in scenario.requests)
    faults = tuple(Fault(kind=FaultKind.KILL, at_s=1.5, member=name) for name in ("prefill-0", "decode-0"))
    return replace(
        scenario, shape=shape, requests=requests, faults=faults, hazards=Hazards(duplicate=0.2, slowness=30.0)
    )


def dying_ranks(scenario: Scenario) -> Scenario:
    """Prefill dies three times, with new requests in between."""
    shape = replace(
        scenario.shape, num_prefill=1, cp=4, tp=1, pp=1, decode_tp=1, decode_pp=1, prefill_pages=24, settle_s=2.0
    )
    requests = tuple(
        replace(each, at_s=4 * (number % 3) + each.at_s / 4) for number, each in enumerate(scenario.requests)
    )
    faults = [Fault(kind=FaultKind.KILL, at_s=4 * rank - 2, member="prefill-0", rank=rank) for rank in (1, 2, 3)]
    return replace(scenario, shape=shape, requests=requests, faults=tuple(faults), hazards=Hazards(slowness=30.0))


def ranks_that_die_elsewhere(scenario: Scenario) -> Scenario:
    """The next start has other addresses, so the remaining processes of this start continue."""
    dying = dying_ranks(scenario)
    return replace(dying, shape=replace(dying.shape, reuses_addresses=False))


def lost_machine(scenario: Scenario) -> Scenario:
    fault = Fault(kind=FaultKind.LOSE_MACHINE, at_s=4, member="prefill-0", duration_s=10.0)
    return replace(scenario, faults=(fault,), hazards=Hazards(slowness=30.0))


def machine_lost_at_the_start(scenario: Scenario) -> Scenario:
    """A replica restarts, and loses its machine at about the time when the table shows it as ready."""
    shape = replace(scenario.shape, num_prefill=1, num_decode=2, quarantine_limit=1.0)
    random = Random(scenario.seed)
    lost_s = random.uniform(3, 6)
    requests = tuple(replace(each, at_s=lost_s - random.uniform(0, 0.5), patience_s=None) for each in scenario.requests)
    faults = (
        Fault(kind=FaultKind.KILL, at_s=1, member="prefill-0"),
        Fault(kind=FaultKind.LOSE_MACHINE, at_s=lost_s, member="prefill-0", duration_s=20.0),
        Fault(kind=FaultKind.PAUSE, at_s=lost_s, member="prefill-0", duration_s=18.0),
        Fault(kind=FaultKind.KILL, at_s=17, member="prefill-0"),
    )
    return replace(scenario, shape=shape, requests=requests, faults=faults, hazards=Hazards(slowness=30.0))


def stalled_table(scenario: Scenario) -> Scenario:
    """The bootstrap service is stalled until requests arrive."""
    shape = replace(scenario.shape, num_prefill=2, num_decode=2)
    requests = tuple(replace(each, at_s=7.9 + each.at_s / 80, patience_s=None) for each in scenario.requests)
    stall = Fault(kind=FaultKind.STALL, at_s=2, member="bootstrap", duration_s=6.0)
    return replace(scenario, shape=shape, requests=requests, faults=(stall,), hazards=Hazards())


def stalled_driver(scenario: Scenario) -> Scenario:
    """The driver stalls when it has seen a silent replica, which shows life again meanwhile."""
    pause = Fault(kind=FaultKind.PAUSE, at_s=2, member="prefill-0", duration_s=4.2)
    stall = Fault(kind=FaultKind.STALL, at_s=5.9, member="driver", duration_s=8.0)
    return replace(scenario, faults=(pause, stall), hazards=Hazards())


def _one_way(scenario: Scenario, member: str, other: str) -> Scenario:
    shape = replace(scenario.shape, num_prefill=2, num_decode=2, skip_below_tokens=0)
    requests = tuple(replace(each, at_s=1 + each.at_s, patience_s=None) for each in scenario.requests)
    fault = Fault(kind=FaultKind.ONE_WAY, at_s=0.5, member=member, other=other, duration_s=120.0)
    return replace(scenario, shape=shape, requests=requests, faults=(fault,), hazards=Hazards())


def no_way_to_prefill(scenario: Scenario) -> Scenario:
    return _one_way(scenario, "decode-0", "prefill-0")


def no_way_to_decode(scenario: Scenario) -> Scenario:
    return _one_way(scenario, "home", "decode-0")


def disorder(scenario: Scenario) -> Scenario:
    return replace(scenario, hazards=Hazards(duplicate=0.2, reorder=0.2, slowness=10.0))


def lossy(scenario: Scenario) -> Scenario:
    return replace(scenario, faults=(), hazards=Hazards(drop=0.1))


def with_digests(scenario: Scenario) -> Scenario:
    return replace(scenario, shape=replace(scenario.shape, verify=Verify.DIGEST))


def calm_with_digests(scenario: Scenario) -> Scenario:
    return calm(with_digests(scenario))


def changed_bytes(scenario: Scenario) -> Scenario:
    return replace(with_digests(scenario), faults=(), hazards=Hazards(flip=0.1))


def several_dp_ranks(scenario: Scenario) -> Scenario:
    shape = replace(scenario.shape, dp=2, decode_dp=2)
    return replace(scenario, shape=shape, faults=(), hazards=Hazards())


def leavers_of_dp_ranks(scenario: Scenario) -> Scenario:
    """Clients disconnect during a step of a follower's DP rank while other requests wait for their pages."""
    prefill_pages = 10 * scenario.shape.cp
    shape = replace(scenario.shape, decode_dp=3, decode_pages=10, prefill_pages=prefill_pages, window=None)
    requests = tuple(
        replace(each, at_s=number % 7 / 4, max_tokens=8, prompt=(each.prompt * 16)[:30], patience_s=number % 3 or None)
        for number, each in enumerate(scenario.requests * 4)
    )
    return replace(scenario, shape=shape, requests=requests, faults=(), hazards=Hazards(slowness=10.0))


def cold_tiers(scenario: Scenario) -> Scenario:
    """Small pools make pages return from lower tiers."""
    tiers = TierShape(host_pages=12, write=WritePolicy.WRITE_THROUGH, prefetch=PrefetchPolicy.WAIT_COMPLETE)
    shape = replace(scenario.shape, prefix_cache=True, tiers=tiers, window=None)
    return replace(scenario, shape=shape, faults=(), hazards=Hazards(fail_move=0.1, slow_move=True))


def calm_without_digests(scenario: Scenario) -> Scenario:
    return calm(replace(scenario, shape=replace(scenario.shape, verify=Verify.COUNTS)))


def shared_heads(scenario: Scenario) -> Scenario:
    """Decode ranks share heads, so each receives part of the pages."""
    shape = replace(scenario.shape, num_kv_heads=2, decode_tp=4, verify=Verify.COUNTS)
    return calm(replace(scenario, shape=shape))


def windows(scenario: Scenario) -> Scenario:
    """Outputs are longer than their window, and small pools evict cached pages."""
    shape = replace(scenario.shape, window=5, tiers=None, ownership=KvOwnership.REPLICATED, prefix_cache=True)
    shape = replace(shape, prefill_pages=24, decode_pages=24, verify=Verify.COUNTS)
    requests = tuple(replace(each, prompt=each.prompt[: 5 * PAGE_SIZE], patience_s=None) for each in scenario.requests)
    return calm(replace(scenario, shape=shape, requests=requests))


def failing_writes(scenario: Scenario) -> Scenario:
    """Writes fail between the layers of one step."""
    shape = replace(scenario.shape, num_layers=4, pp=1, chunk_tokens=64)
    return replace(scenario, shape=shape, faults=(), hazards=Hazards(fail_write=0.3, slowness=30.0))


def cold_tiers_of_peers(scenario: Scenario) -> Scenario:
    """Layers of cached pages also come from other ranks' host memory."""
    cold = cold_tiers(scenario)
    assert cold.shape.tiers is not None
    shape = replace(cold.shape, tiers=replace(cold.shape.tiers, shares_host=True), cp=2, dp=1, tp=1)
    return replace(cold, shape=replace(shape, num_kv_heads=2, ownership=KvOwnership.REPLICATED), hazards=Hazards())


def cold_tiers_of_shared_heads(scenario: Scenario) -> Scenario:
    cold = cold_tiers(scenario)
    return replace(cold, shape=replace(cold.shape, num_kv_heads=1, decode_tp=4), hazards=Hazards())


def windows_below(scenario: Scenario) -> Scenario:
    """Windows also come from host memory and storage."""
    shape = replace(cold_tiers(scenario).shape, window=5, ownership=KvOwnership.REPLICATED, prefill_pages=24)
    requests = tuple(replace(each, prompt=each.prompt[: 5 * PAGE_SIZE], patience_s=None) for each in scenario.requests)
    return calm(replace(scenario, shape=replace(shape, decode_pages=24, verify=Verify.COUNTS), requests=requests))


DEFECTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Conditions, str]] = [
    (layer_defects.free_visible_pages, windows, FOREIGN_PAGE),
    (layer_defects.continue_without_the_window, windows, EARLY_READ),
    (layer_defects.reserve_too_little_of_a_window, windows, EARLY_READ),
    (layer_defects.skip_loading_the_window, windows_below, EARLY_READ),
    (layer_defects.use_the_first_lifetime_for_all_pages, windows_below, FOREIGN_PAGE),
    (defects.free_on_timeout, unchanged, f"{FOREIGN_WRITE}|{EARLY_READ}"),
    (defects.count_the_same_sender_twice, repeated_messages, EARLY_READ),
    (router_defects.reuse_a_room, unchanged, f"{FAILS_IN_CALM}|{EARLY_READ}"),
    (defects.restart_next_to_remaining_ranks, ranks_that_die_elsewhere, FOREIGN_WRITE),
    (defects.ignore_the_incarnation, machine_lost_at_the_start, FOREIGN_WRITE),
    (defects.accept_messages_to_an_earlier_start, late_messages, OTHER_START),
    (defects.accept_messages_from_an_earlier_start, late_messages, f"{FOREIGN_WRITE}|{EARLY_READ}"),
    (defects.accept_any_submit, restarts_in_place, OTHER_START),
    (defects.take_any_ticket, restarts_in_place, OTHER_START),
    (defects.decode_any_submit, restarts_in_place, OTHER_START),
    (defects.skip_a_page, calm, FAILS_IN_CALM),
    (defects.skip_a_page_and_ignore_counts, calm, EARLY_READ),
    (defects.drop_the_drain_ack, unchanged, NEVER_ENDS),
    (defects.miscount_pages, calm, FAILS_IN_CALM),
    (defects.end_before_it_is_drained, commands, FAILS_IN_CALM),
    (defects.restart_one_rank_alone, dying_ranks, f"which it does not know|{EARLY_READ}|{NEVER_ENDS}"),
    (defects.start_before_pages_are_checked, changed_bytes, EARLY_READ),
    (defects.ignore_page_checks, changed_bytes, EARLY_READ),
    (defects.skip_a_digest, calm_with_digests, FAILS_IN_CALM),
    (defects.skip_a_digest_and_ignore_it, changed_bytes, EARLY_READ),
    (defects.route_rooms_by_number, several_dp_ranks, f"{FAILS_IN_CALM}|{NEVER_ENDS}"),
    (defects.ticket_pages_that_are_computed_into, leavers_of_dp_ranks, f"{FOREIGN_WRITE}|{EARLY_READ}"),
    (router_defects.ignore_gaps_in_kv_events, lossy, "its index differs from the cache"),
    (defects.free_source_pages_early, unchanged, f"{FOREIGN_WRITE}|{EARLY_READ}"),
    (defects.free_pages_without_settling, dying_ranks, FOREIGN_WRITE),
    (defects.treat_unreachable_as_gone, lost_machine, FOREIGN_WRITE),
    (defects.prove_only_starts_known_to_the_driver, machine_lost_at_the_start, FOREIGN_WRITE),
    (defects.keep_no_tombstones, disorder, FOREIGN_WRITE),
    (defects.judge_leases_by_the_clock, stalled_table, FAILS_IN_CALM),
    (defects.judge_silence_by_the_clock, stalled_driver, TAKEN_FOR_SILENT),
    (defects.repeat_tickets_for_ever, no_way_to_prefill, FAILS_IN_MILD),
    (router_defects.inquire_for_ever, no_way_to_decode, FAILS_IN_MILD),
    (defects.use_a_page_id_as_a_local_index, unchanged, EARLY_READ),
    (router_defects.continue_at_output_0, mild, FAILS_IN_MILD),
    (router_defects.restart_at_the_original_prompt, dying_streams, EARLY_READ),
    (router_defects.retry_in_the_same_room, mild, FAILS_IN_MILD),
    (router_defects.retry_where_it_failed, mild, FAILS_IN_MILD),
    (router_defects.cancel_no_other_target, mild, NOT_CANCELLED),
    (router_defects.never_inquire, lossy, DEADLINE),
    (router_defects.answer_no_inquiry, lossy, NEVER_ENDS),
    (defects.end_a_tier_job_with_the_first_result, cold_tiers, FOREIGN_PAGE),
    (defects.keep_copies_of_evicted_pages, cold_tiers, FOREIGN_PAGE),
    (defects.believe_failed_copies, cold_tiers, FOREIGN_PAGE),
    (layer_defects.send_layers_before_they_are_computed, calm_without_digests, EARLY_READ),
    (layer_defects.skip_the_last_layers, calm, FAILS_IN_CALM),
    (layer_defects.skip_the_last_layers_and_ignore_counts, calm_without_digests, EARLY_READ),
    (layer_defects.send_the_first_layers_again, calm, FAILS_IN_CALM),
    (layer_defects.count_pages_with_their_first_layers, calm_without_digests, f"{FAILS_IN_CALM}|{EARLY_READ}"),
    (layer_defects.report_drained_early, unchanged, f"{FOREIGN_WRITE}|{NEVER_ENDS}"),
    (layer_defects.resume_after_a_failure, failing_writes, FOREIGN_WRITE),
    (layer_defects.read_layers_before_they_are_loaded, cold_tiers, EARLY_READ),
    (layer_defects.announce_a_layer_too_many, cold_tiers, EARLY_READ),
    (layer_defects.load_one_head_of_peers, cold_tiers_of_peers, EARLY_READ),
    (layer_defects.load_other_layers_of_peers, cold_tiers_of_peers, EARLY_READ),
    (layer_defects.send_pages_to_the_next_copy, shared_heads, FOREIGN_WRITE),
    (layer_defects.send_all_pages_to_each_copy, shared_heads, FOREIGN_WRITE),
    (layer_defects.skip_head_copies, shared_heads, EARLY_READ),
    (layer_defects.count_layers_from_the_first_stage, calm, FAILS_IN_CALM),
    (layer_defects.swap_heads, calm_without_digests, EARLY_READ),
]
"""Each defect, the conditions in which it is caught, and the broken promise."""
SHOWN_BY: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    defects.restart_next_to_remaining_ranks: 695,
    defects.repeat_tickets_for_ever: 19,
    router_defects.continue_at_output_0: 36,
    layer_defects.read_layers_before_they_are_loaded: 69,
    layer_defects.announce_a_layer_too_many: 69,
}
"""Seeds that reveal the rarest defects. They are tried first."""
FAULTLESS = [*dict.fromkeys(each for _, each, _ in DEFECTS if each is not unchanged), cold_tiers_of_shared_heads]


def violation_of(scenario: Scenario) -> str | None:
    return Simulation(scenario).run().violation


@pytest.mark.parametrize(("defect", "conditions", "promise"), DEFECTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_defect_is_caught(
    defect: Callable[[pytest.MonkeyPatch], None], conditions: Conditions, promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    seeds = [SHOWN_BY.get(defect, 0), *range(MAX_SEEDS)]
    violation = next(filter(None, (violation_of(conditions(draw_scenario(seed))) for seed in seeds)), None)
    assert violation is not None, f"{MAX_SEEDS} seeds saw nothing of it"
    assert re.search(promise, violation), violation


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 50), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("conditions", FAULTLESS)
def test_without_a_defect_the_same_conditions_break_nothing(conditions: Conditions, seeds: range) -> None:
    assert {seed: found for seed in seeds if (found := violation_of(conditions(draw_scenario(seed))))} == {}
