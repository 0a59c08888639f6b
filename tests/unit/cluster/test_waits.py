"""Waits of the launcher: for free machines, and for replicas that drain."""

from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from cluster.actors import Machine
from cluster.launch.waits import QUIET_HEARTBEATS, Capacity, Deadline, DrainWatch, await_capacity, send_until
from cluster.spec.config import DeployConfig, TransferBackendName, TransferConfig
from cluster.spec.errors import ConfigError
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.registry import ReplicaEntry, ReplicaLoad, TableSnapshot
from tests.fakes.rank_records import tier_state
from tests.fakes.ray import FakeSystem, FakeTable, World

CONFIG = DeployConfig(transfer=TransferConfig(backend=TransferBackendName.MOONCAKE))
"""One worker of each role."""


def machine(name: str, cpus: float) -> Machine:
    return Machine(node_id=name, address=name, cpus=cpus, gpus=0)


def wait_for_capacity(
    system: FakeSystem,
    say: Callable[[str], None],
    check: Callable[[], None],
    timeout_s: float = 60.0,
    only: Sequence[ReplicaId] | None = None,
) -> None:
    await_capacity(system, Capacity(config=CONFIG, machines=system.machines, only=only), timeout_s, say, check)


def test_nothing_is_printed_if_resources_suffice() -> None:
    said: list[str] = []
    system = FakeSystem([machine("head", 2)])
    wait_for_capacity(system, said.append, lambda: None)
    assert said == []
    assert system.log == []


def test_missing_machines_are_requested_and_awaited() -> None:
    said: list[str] = []
    system = FakeSystem([machine("head", 0)])
    system.joining = [machine("first", 1), machine("second", 1)]
    wait_for_capacity(system, said.append, lambda: None)
    [line] = said
    assert line.startswith("waiting at most 60 s for machines: ")
    assert "wanted: 2 workers with 1 CPUs each; capacity for 0 workers; free: head 0 CPUs" in line
    assert system.log == ["want 2 bundles", "want nothing"]


def test_only_the_replicas_in_question_are_waited_for() -> None:
    system = FakeSystem([machine("head", 1)])
    only = [ReplicaId("decode-7")]
    wait_for_capacity(system, lambda _: None, lambda: None, only=only)
    assert system.log == []
    system = FakeSystem([machine("head", 0)])
    system.joining = [machine("first", 1)]
    wait_for_capacity(system, lambda _: None, lambda: None, only=only)
    assert system.log == ["want 1 bundles", "want nothing"]


def test_the_wait_ends_with_the_time_to_start_and_says_what_is_missing() -> None:
    system = FakeSystem([machine("head", 0)])
    with pytest.raises(ConfigError, match="capacity for 0 workers"):
        wait_for_capacity(system, lambda _: None, lambda: None, timeout_s=0.01)


def test_a_signal_ends_the_wait() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    system = FakeSystem([machine("head", 0)])
    system.joining = [machine(f"machine-{n}", 0) for n in range(9)]
    with pytest.raises(KeyboardInterrupt):
        wait_for_capacity(system, lambda _: None, stop)


D0 = ReplicaId("decode-0")
EMPTY = ReplicaLoad(draining=True, num_taken=7)


def table_of(load: ReplicaLoad, incarnation: int = 3) -> TableSnapshot:
    entry = ReplicaEntry(replica=D0, incarnation=Incarnation(incarnation), ready=True, ranks=(), load=load)
    return TableSnapshot(version=1, replicas=(entry,), reaped={})


def over_at(*seen: tuple[float, TableSnapshot | None]) -> float:
    """Return when the watch is over, in heartbeats, if nothing else is observed."""
    watch = DrainWatch(D0, Incarnation(3))
    for at_s, snapshot in seen:
        assert not watch.is_over(at_s)
        watch.saw(snapshot, at_s)
    last_s = seen[-1][0]
    later = (last_s + step / 4 for step in range(100))
    return next((at_s for at_s in later if watch.is_over(at_s)), float("inf"))


def test_two_quiet_heartbeats_are_needed() -> None:
    assert over_at((0.0, table_of(EMPTY)), (1.0, table_of(EMPTY)), (2.0, table_of(EMPTY))) == QUIET_HEARTBEATS


def test_open_waiting_or_undrained_replicas_are_not_empty() -> None:
    for change in ({"num_running": 1}, {"num_waiting": 1}, {"draining": False}):
        assert over_at((0.0, table_of(replace(EMPTY, **change)))) == float("inf")
        assert over_at((0.0, table_of(EMPTY)), (1.0, table_of(replace(EMPTY, **change)))) == float("inf")


def test_a_replica_that_stores_pages_is_not_empty() -> None:
    storing = tier_state(is_storing=True)
    assert over_at((0.0, table_of(replace(EMPTY, tiers=storing)))) == float("inf")
    done = table_of(replace(EMPTY, tiers=tier_state(is_storing=False)))
    assert over_at((0.0, table_of(replace(EMPTY, tiers=storing))), (3.0, done)) == 3.0 + QUIET_HEARTBEATS


def test_a_request_between_two_heartbeats_restarts_the_wait() -> None:
    assert over_at((0.0, table_of(EMPTY)), (2.0, table_of(replace(EMPTY, num_taken=8)))) == 2.0 + QUIET_HEARTBEATS


def test_another_start_or_no_table_says_nothing() -> None:
    assert over_at((0.0, table_of(EMPTY, incarnation=4))) == float("inf")
    assert over_at((0.0, table_of(EMPTY)), (1.0, None)) == float("inf")
    assert over_at((0.0, table_of(EMPTY)), (1.0, None), (2.0, table_of(EMPTY))) == 2.0 + QUIET_HEARTBEATS


def test_a_drain_without_grace_is_still_sent() -> None:
    reported: list[str] = []
    world = World()
    assert not send_until(FakeTable(world), lambda _: False, lambda: reported.append("drain"), Deadline(0.0))
    assert reported == ["drain"]
