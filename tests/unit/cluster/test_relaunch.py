"""The driver's loop with fake processes: what is replaced, requested, killed and placed again."""

from dataclasses import replace
from itertools import count

import pytest

from cluster.actors import Machine
from cluster.launch.launcher import Launcher
from cluster.spec.config import (
    DecodeConfig,
    TransferBackendName,
    TransferConfig,
)
from cluster.spec.errors import BatonError, ConfigError, PeerUnreachableError, UserError
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.registry import ReplicaEntry
from cluster.supervisor.commands import DrainCommand, OperatorCommand, RestartCommand, ResumeCommand, ScaleCommand
from cluster.supervisor.events import Outcome
from tests.fakes.launching import CONFIG, ONE, WAIT_S, FakeDriver, make_launcher
from tests.fakes.ray import HOME, FakeReservation, FakeSystem, FakeTable, World
from tests.fakes.waits import wait_until


@pytest.fixture(autouse=True)
def short_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.launch.waits.HEARTBEAT_S", 0.01)


def test_killed_rank_brings_a_whole_new_gang() -> None:
    world = World()
    driver = FakeDriver(world)
    assert driver.announced.wait(WAIT_S)
    old = world.system.living("prefill-0")
    old[1].die()
    wait_until(lambda: any("running, incarnation" in line for line in driver.lines))
    fresh = world.system.living("prefill-0")
    assert len(fresh) == len(old) == 2
    assert not set(fresh) & set(old)
    assert len(world.system.living("decode-")) == 2
    snapshot = world.table.snapshot(0.0)
    entry = snapshot.find(ReplicaId("prefill-0"))
    assert entry is not None
    assert entry.ready
    assert snapshot.reaped[ReplicaId("prefill-0")] < entry.incarnation
    driver.supervisor.request_stop("SIGINT")
    driver.ended.result(WAIT_S)


def test_gang_that_fails_again_is_tried_again() -> None:
    world = World()
    driver = FakeDriver(world)
    assert driver.announced.wait(WAIT_S)
    world.load_errors["decode-1", 0] = BatonError("no memory")
    world.system.living("decode-1")[0].die()
    wait_until(lambda: any("failed 3 times in a row" in line for line in driver.lines))
    assert any("decode-1 rank 0: no memory" in line for line in driver.lines)
    del world.load_errors["decode-1", 0]
    wait_until(lambda: any("decode-1: running, incarnation" in line for line in driver.lines))
    driver.supervisor.request_stop("SIGINT")
    driver.ended.result(WAIT_S)


def test_lost_bootstrap_is_replaced_and_nothing_else() -> None:
    world = World()
    driver = FakeDriver(world)
    assert driver.announced.wait(WAIT_S)
    workers = world.system.living("prefill") + world.system.living("decode") + world.system.living("router")
    world.system.living("bootstrap")[0].die()
    wait_until(lambda: any("bootstrap: running, incarnation" in line for line in driver.lines))
    assert all(actor.alive for actor in workers)
    driver.supervisor.request_stop("SIGINT")
    driver.ended.result(WAIT_S)


def test_orders_reach_the_replicas_and_the_table_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.launch.waits.RESEND_S", 0.05)
    driver = FakeDriver(World())
    assert driver.announced.wait(WAIT_S)
    table, system = driver.world.table, driver.world.system

    def give(order: OperatorCommand) -> tuple[Outcome, str]:
        *_, last = driver.supervisor.give(order)
        return last.outcome, last.line

    def entries() -> dict[str, ReplicaEntry]:
        return {entry.replica: entry for entry in table.snapshot(0.0).replicas}

    assert give(DrainCommand(replica=ReplicaId("decode-1"))) == (Outcome.DONE, "decode-1: drained")
    assert entries()["decode-1"].load.draining
    assert give(ResumeCommand(replica=ReplicaId("decode-1")))[0] is Outcome.DONE
    wait_until(lambda: not entries()["decode-1"].load.draining)
    driver.world.num_commands, driver.world.num_lost = 0, 1
    assert give(DrainCommand(replica=ReplicaId("decode-1"))) == (Outcome.DONE, "decode-1: drained")
    driver.world.num_commands = 0
    assert give(ResumeCommand(replica=ReplicaId("decode-1"))) == (Outcome.DONE, "decode-1: takes requests again")
    assert not entries()["decode-1"].load.draining
    before = {name: entry.incarnation for name, entry in entries().items()}
    assert give(RestartCommand(replicas=(ReplicaId("decode-0"), ReplicaId("decode-1")), is_rolling=True)) == (
        Outcome.DONE,
        "restarted",
    )
    assert {name for name, entry in entries().items() if entry.incarnation > before[name]} == {"decode-0", "decode-1"}
    assert give(ScaleCommand(prefill=2, decode=1)) == (Outcome.DONE, "prefill: 2, decode: 1")
    assert entries().keys() == {"prefill-0", "prefill-1", "decode-0"}
    assert len(system.living("prefill-1")) == 2
    assert system.living("decode-1") == []
    assert len(system.reserved) == 3
    outcome, line = give(ScaleCommand(prefill=40))
    assert (outcome, "capacity for" in line) == (Outcome.REFUSED, True)
    driver.supervisor.request_stop("SIGINT")
    driver.ended.result(WAIT_S)


def test_a_replica_that_stays_busy_is_given_its_grace_and_no_more() -> None:
    driver = FakeDriver(World())
    assert driver.announced.wait(WAIT_S)
    driver.world.num_open = 1
    (answer,) = driver.supervisor.give(DrainCommand(replica=ReplicaId("decode-1"), grace_s=0.1))
    assert answer.outcome is Outcome.FAILED
    driver.supervisor.request_stop("SIGINT")
    driver.ended.result(WAIT_S)


def test_a_possibly_running_start_is_killed_until_proven_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    launcher = make_launcher(world)
    launcher.start("bootstrap", ONE)
    launcher.start("prefill-0", ONE)
    with monkeypatch.context() as patch:
        patch.setattr(world.system, "kill", lambda *_: False)
        assert not launcher.end("prefill-0", ONE)
        assert not launcher.prove("prefill-0", ONE)
    assert world.system.reserved == [], "its bundles are for the next start"
    launcher.start("prefill-0", Incarnation(2))
    assert launcher.prove("prefill-0", ONE)
    assert len(world.system.reserved) == 1
    assert len(world.system.living("prefill-0")) == 2


def test_an_unregistered_start_needs_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    launcher = make_launcher(world)
    launcher.start("bootstrap", ONE)
    world.load_errors["prefill-0", 1] = BatonError("no memory")
    with pytest.raises(BatonError, match="no memory"):
        launcher.start("prefill-0", ONE)
    monkeypatch.setattr(world.system, "kill", lambda *_: False)
    assert not launcher.end("prefill-0", ONE), "its machine counts as lost"
    assert launcher.prove("prefill-0", ONE), "or its earlier starts would never be proven gone"


def test_a_registered_start_needs_proof_even_if_the_driver_has_not_seen_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def miss(*_: object) -> None:
        wait_until(lambda: world.table.snapshot(0.0).find(ReplicaId("prefill-0")))
        raise BatonError("not ready in time")

    world = World()
    launcher = make_launcher(world)
    launcher.start("bootstrap", ONE)
    monkeypatch.setattr("cluster.launch.gang.Gang._wait_ready", miss)
    with pytest.raises(BatonError, match="not ready"):
        launcher.start("prefill-0", ONE)
    monkeypatch.setattr(world.system, "kill", lambda *_: False)
    assert not launcher.end("prefill-0", ONE)
    assert not launcher.prove("prefill-0", ONE)
    monkeypatch.undo()
    assert launcher.prove("prefill-0", ONE)


def test_a_replica_of_a_lost_machine_is_placed_on_another() -> None:
    away = [Machine(node_id=name, address=f"10.0.0.{name}", cpus=2, gpus=0) for name in ("2", "3")]
    home = Machine(node_id="home", address="10.0.0.1", cpus=0, gpus=0)
    world = World(FakeSystem([home, *away]))
    config = CONFIG.model_copy(
        update={"transfer": TransferConfig(backend=TransferBackendName.MOONCAKE), "decode": DecodeConfig()}
    )
    launcher = Launcher(world.tools(), config, "model", "token", lambda *_: None)
    launcher.start("bootstrap", ONE)
    launcher.start("prefill-0", ONE)
    first = {bundle.node_id for bundle in world.system.reserved[0].bundles}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.system, "kill", lambda *_: False)
        assert not launcher.end("prefill-0", ONE)
    launcher.start("prefill-0", Incarnation(2))
    second = {bundle.node_id for bundle in world.system.reserved[0].bundles}
    assert (len(first), len(second), first & second) == (1, 1, set())
    assert launcher.prove("prefill-0", ONE)
    assert launcher.end("prefill-0", Incarnation(2))
    launcher.start("prefill-0", Incarnation(3))
    assert {bundle.node_id for bundle in world.system.reserved[0].bundles} == second, "it stays where it is"


def test_a_replica_whose_place_was_taken_is_placed_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another cluster on the same Ray has taken the CPUs, or another replica of the same lost machine."""

    def refuse(name: str, *_: object) -> FakeReservation:
        raise UserError(f"{name}: no capacity within 10 s")

    home, first, second = (
        Machine(node_id=name, address=name, cpus=cpus, gpus=0) for name, cpus in (("1", 0), ("2", 2), ("3", 8))
    )
    world = World(FakeSystem([home, first, second]))
    config = CONFIG.model_copy(update={"transfer": TransferConfig(backend=TransferBackendName.MOONCAKE)})
    launcher = Launcher(world.tools(), config, "model", "token", lambda *_: None)
    launcher.start("bootstrap", ONE)
    launcher.start("prefill-0", ONE)
    assert {bundle.node_id for bundle in world.system.reserved[0].bundles} == {"2"}
    assert launcher.end("prefill-0", ONE)
    world.system.machines()[1] = replace(first, cpus=0)
    with monkeypatch.context() as patch:
        patch.setattr(world.system, "reserve", refuse)
        with pytest.raises(UserError, match="no capacity"):
            launcher.start("prefill-0", Incarnation(2))
    assert launcher.end("prefill-0", Incarnation(2))
    launcher.start("prefill-0", Incarnation(3))
    assert {bundle.node_id for bundle in world.system.reserved[0].bundles} == {"3"}
    world.system.machines()[1] = first
    assert launcher.end("prefill-0", Incarnation(3))
    launcher.start("prefill-0", Incarnation(4))
    assert {bundle.node_id for bundle in world.system.reserved[0].bundles} == {"3"}, "it stays where it is"


def test_more_replicas_wait_for_a_machine_that_the_autoscaler_adds() -> None:
    home, first, second = (
        Machine(node_id=name, address=name, cpus=cpus, gpus=0) for name, cpus in (("1", 0), ("2", 4), ("3", 4))
    )
    world = World(FakeSystem([home, first]))
    config = CONFIG.model_copy(update={"transfer": TransferConfig(backend=TransferBackendName.MOONCAKE)})
    launcher = Launcher(world.tools(), config, "model", "token", lambda *_: None)
    world.system.joining = [second]
    names = [f"decode-{index}" for index in range(2, 7)]
    with pytest.raises(ConfigError, match="capacity for 4 workers"):
        launcher.place(names)
    assert world.system.log == [], "nobody asked for machines"
    launcher.place(names, wait_s=60.0)
    assert world.system.log == ["want 5 bundles", "want nothing"]
    assert world.stages[-1][0] == "scale"
    assert "waiting at most 60 s for machines" in world.stages[-1][1]
    assert set(names) <= set(launcher.names)


def test_replicas_that_share_memory_wait_for_no_other_machine() -> None:
    world = World(FakeSystem([replace(HOME, cpus=4)]))
    launcher = make_launcher(world)
    world.system.joining = [replace(HOME, node_id="other", cpus=64)]
    with pytest.raises(ConfigError):
        launcher.place(["decode-2", "decode-3", "decode-4", "decode-5", "decode-6"], wait_s=60.0)
    assert world.system.log == []


def test_without_another_machine_the_lost_one_is_reported_and_awaited() -> None:
    away = Machine(node_id="2", address="10.0.0.2", cpus=64, gpus=0)
    world = World(FakeSystem([replace(HOME, cpus=0), away]))
    config = CONFIG.model_copy(update={"transfer": TransferConfig(backend=TransferBackendName.MOONCAKE)})
    launcher = Launcher(world.tools(), config, "model", "token", lambda *_: None)
    launcher.start("bootstrap", ONE)
    launcher.start("decode-0", ONE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.system, "kill", lambda *_: False)
        assert not launcher.end("decode-0", ONE)
    with pytest.raises(ConfigError, match="capacity for 0 workers"):
        launcher.start("decode-0", Incarnation(2))
    assert launcher.prove("decode-0", ONE)
    launcher.start("decode-0", Incarnation(3))


def test_an_end_is_announced_until_the_table_confirms_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.supervisor.loop._RETRY_S", 0.001)
    unregister, attempts = FakeTable.unregister, count()

    def answer_late(self: FakeTable, replica: ReplicaId, incarnation: Incarnation, reaped: bool) -> None:
        if next(attempts) < 20:
            raise PeerUnreachableError("the bootstrap service does not answer")
        unregister(self, replica, incarnation, reaped)

    monkeypatch.setattr(FakeTable, "unregister", answer_late)
    driver = FakeDriver(World())
    assert driver.announced.wait(WAIT_S)
    driver.world.system.living("prefill-0")[0].die()
    wait_until(lambda: ReplicaId("prefill-0") in driver.world.table.snapshot(0.0).reaped)
    driver.supervisor.request_stop("SIGINT")
    driver.ended.result(WAIT_S)


@pytest.mark.parametrize("answer", [False, RuntimeError("one hiccup of Ray")])
def test_the_table_learns_of_an_end_once_proven(answer: bool | RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: object) -> bool:
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    monkeypatch.setattr("cluster.supervisor.loop._PROVE_S", 0.01)
    world = World()
    driver = FakeDriver(world)
    assert driver.announced.wait(WAIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(world.system, "kill", kill)
        world.system.living("prefill-0")[0].die()
        wait_until(lambda: any("running, incarnation" in line for line in driver.lines))
        assert ReplicaId("prefill-0") not in world.table.snapshot(0.0).reaped
    wait_until(lambda: ReplicaId("prefill-0") in world.table.snapshot(0.0).reaped)
    driver.supervisor.request_stop("SIGINT")
    driver.ended.result(WAIT_S)
