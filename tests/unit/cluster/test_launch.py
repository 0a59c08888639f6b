"""Launching with fake processes: the order of a start, the reported error, and the killed processes."""

import pickle
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NoReturn

import huggingface_hub
import pytest
import torch

from cluster.actors import Machine
from cluster.launch import gang
from cluster.launch.kinds import RouterActor, WorkerActor, service_environ, worker_environ
from cluster.launch.launcher import LOOPBACK, Launcher
from cluster.launch.waits import Deadline, blame, gather
from cluster.logs import ProcessLog
from cluster.processes import this_process
from cluster.spec.config import DeployConfig, LogConfig, ResourcesConfig
from cluster.spec.errors import BatonError, ConfigError, PeerLostError, UserError
from cluster.spec.hicache_config import HicacheConfig
from cluster.spec.ids import Incarnation
from cluster.spec.router_config import RouterConfig
from cluster.spec.worker_spec import Rendezvous, RouterShare
from tests.fakes.launching import CONFIG, ONE, WAIT_S, FakeDriver, make_launcher, start_all
from tests.fakes.ray import HOME, FakeSystem, World
from tests.fakes.waits import wait_until


@pytest.fixture(autouse=True)
def short_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.launch.waits.HEARTBEAT_S", 0.01)


def test_members_are_the_services_and_every_replica() -> None:
    names = make_launcher(World()).names
    assert names == ["bootstrap", "router", "prefill-0", "decode-0", "decode-1"]


def test_gang_joins_before_it_loads_and_loads_before_it_runs() -> None:
    world = World()
    start_all(make_launcher(world))
    log = [line for line in world.system.log if "prefill-0" in line]
    rank = ["prefill-0-rank0-1", "prefill-0-rank1-1"]
    assert log == [
        *(f"start {name}" for name in rank),
        *(f"fetch {name}" for name in rank),
        *(f"build {name}" for name in rank),
        f"open_store {rank[0]}",
        *(f"load {name}" for name in rank),
        *(f"run {name}" for name in rank),
    ]
    assert all(entry.ready for entry in world.table.snapshot(0.0).replicas)


def test_processes_start_before_the_bootstrap_service_answers() -> None:
    world = World()
    launcher = make_launcher(world)
    thread = threading.Thread(target=launcher.start, args=("decode-0", ONE))
    thread.start()
    wait_until(lambda: "fetch decode-0-rank0-1" in world.system.log)
    assert "build decode-0-rank0-1" not in world.system.log
    launcher.start("bootstrap", ONE)
    thread.join(WAIT_S)
    assert "run decode-0-rank0-1" in world.system.log


def test_fetching_the_model_takes_nothing_of_the_time_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    resources = CONFIG.resources.model_copy(update={"start_timeout_s": 0.5})
    launcher = _launcher(world, resources)
    for name in ("bootstrap", "decode-0"):
        launcher.start(name, ONE)
    assert ("decode-0", "finding or downloading the model") in world.stages
    monkeypatch.setattr(gang, "FETCH_TIMEOUT_S", 0.01)
    late = _launcher(World(), resources)
    with pytest.raises(BatonError, match=r"decode-0 rank 0: not ready after 0.01 s \(the limit on downloading"):
        late.start("decode-0", ONE)


def _launcher(world: World, resources: ResourcesConfig) -> Launcher:
    world.fetch_s = 0.6
    config = CONFIG.model_copy(update={"resources": resources})
    return Launcher(world.tools(), config, "model", "token", lambda *_: None)


@pytest.mark.parametrize(
    ("machines", "host"),
    [([HOME], LOOPBACK), ([HOME, Machine(node_id="other", address="10.0.0.2", cpus=1, gpus=0)], HOME.address)],
)
def test_one_machine_stays_on_loopback_and_several_do_not(machines: list[Machine], host: str) -> None:
    world = World(FakeSystem(machines))
    launcher = make_launcher(world)
    launcher.start("bootstrap", ONE)
    launcher.start("router", ONE)
    assert world.rendezvous[0].bootstrap_url == f"http://{host}:3000"
    assert launcher.router_url == f"http://{host}:8000"


def test_restarted_services_keep_their_ports_and_the_age_of_the_cluster() -> None:
    world = World()
    launcher = make_launcher(world)
    launcher.start("bootstrap", ONE)
    launcher.start("router", ONE)
    for name in ("bootstrap", "router"):
        assert launcher.end(name, ONE)
        launcher.start(name, Incarnation(2))
    first, second = world.rendezvous
    assert first.bootstrap_url == f"http://{LOOPBACK}:3000"
    assert second == first
    assert time.time() - first.started == pytest.approx(this_process().age_s, abs=1)
    assert launcher.router_url == f"http://{LOOPBACK}:8000"


def test_a_router_that_ends_before_it_is_followed_has_its_previous_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("cluster.launch.launcher.follow_router", lambda address, *_: asked.append(address()))
    launcher = make_launcher(World())
    launcher.start("bootstrap", ONE)
    launcher.start("router", ONE)
    assert launcher.end("router", ONE)
    launcher.follow_router("router", lambda _: None)
    launcher.start("router", Incarnation(2))
    launcher.follow_router("router", lambda _: None)
    assert len(asked) == 2
    assert all(asked)


def test_router_processes_share_a_port_and_drain_together() -> None:
    world = World()
    config = CONFIG.model_copy(update={"router": RouterConfig(port=0, processes=3)})
    launcher = Launcher(world.tools(), config, "model", "token", lambda *_: None)
    routers = ["router", "router-1", "router-2"]
    assert launcher.names[:4] == ["bootstrap", *routers]
    for name in ("bootstrap", *routers):
        launcher.start(name, ONE)
    assert launcher.end("router-1", ONE)
    launcher.start("router-1", Incarnation(2))
    assert launcher.router_url == f"http://{LOOPBACK}:4000"
    for actor in ("router-1", "router-1-1", "router-2-1", "router-1-2"):
        assert f"run {actor}" in world.system.log
    assert launcher.drain()
    assert all(world.end_of(f"{name}-control").is_set() for name in routers)


@pytest.mark.parametrize(("port", "ports"), [(8000, [8000, 8000, 8000]), (0, [0, 4000, 4000])])
def test_router_processes_start_in_parallel_once_the_port_is_known(port: int, ports: list[int]) -> None:
    world = World()
    world.routers_at_once = threading.Barrier(len([port for port in ports if port]))
    config = CONFIG.model_copy(update={"router": RouterConfig(port=port, processes=3)})
    launcher = Launcher(world.tools(), config, "model", "token", lambda *_: None)
    start_all(launcher)
    assert world.router_ports == ports
    assert launcher.router_url == f"http://{LOOPBACK}:{ports[-1]}"


@pytest.mark.parametrize("is_stored", [True, False])
def test_replicas_that_store_pages_are_drained_after_the_routers(*, is_stored: bool) -> None:
    world = World()
    storage = {"backend": "files" if is_stored else "none"}
    hicache = HicacheConfig.model_validate({"host_gib": 1.0, "storage": storage})
    launcher = Launcher(
        world.tools(), CONFIG.model_copy(update={"hicache": hicache}), "model", "token", lambda *_: None
    )
    start_all(launcher)
    assert launcher.drain()
    assert world.end_of("router-control").is_set()
    assert {entry.load.draining for entry in world.table.snapshot(0.0).replicas} == {is_stored}


def test_stop_ends_in_time_when_ray_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    launcher = make_launcher(world)
    launcher.start("bootstrap", ONE)
    monkeypatch.setattr("cluster.launch.launcher.KILL_S", 0.01)
    monkeypatch.setattr("cluster.launch.launcher.GRACE_S", 0.01)
    answer = threading.Event()
    monkeypatch.setattr(world.system, "kill", lambda *_: answer.wait())
    began_s = time.monotonic()
    launcher.stop()
    assert time.monotonic() - began_s < WAIT_S
    answer.set()


def failed_call(error: BaseException) -> "Future[None]":
    call: Future[None] = Future()
    call.set_exception(error)
    return call


def test_a_lost_peer_is_no_reason_while_the_peer_itself_may_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.launch.waits.LAST_WORDS_S", WAIT_S)
    late: Future[None] = Future()
    threading.Timer(0.05, late.set_exception, [RuntimeError("no memory")]).start()
    with pytest.raises(BatonError, match=r"^rank 1: RuntimeError: no memory$"):
        gather({"rank 0": failed_call(PeerLostError("rank 1 is gone")), "rank 1": late}, Deadline(WAIT_S))


@pytest.mark.parametrize(("wait_s", "errors"), [(WAIT_S, ["no memory"]), (0.0, ["is gone", "no memory"])])
def test_a_running_rank_that_lost_its_peer_speaks_last(
    monkeypatch: pytest.MonkeyPatch, wait_s: float, errors: list[str]
) -> None:
    monkeypatch.setattr("cluster.launch.launcher.LAST_WORDS_S", wait_s)
    ended: list[str] = []
    launcher = make_launcher(World(), ended)
    launcher._report_end("prefill-0", ONE, "rank 0", failed_call(PeerLostError("rank 1 is gone")))
    if wait_s == 0:
        wait_until(lambda: bool(ended))
    launcher._report_end("prefill-0", ONE, "rank 1", failed_call(RuntimeError("no memory")))
    assert [words in line for words, line in zip(errors, ended, strict=True)] == [True] * len(errors)


def test_ranks_that_end_before_registration_are_reported_by_the_first_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.launch.waits.LAST_WORDS_S", WAIT_S)
    world = World()
    world.run_errors = {("prefill-0", 0): PeerLostError("rank 1 is gone"), ("prefill-0", 1): RuntimeError("no memory")}
    launcher = make_launcher(world)
    launcher.start("bootstrap", ONE)
    with pytest.raises(BatonError, match=r"^prefill-0 rank 1: RuntimeError: no memory$"):
        launcher.start("prefill-0", ONE)


def test_ended_replica_releases_its_bundles() -> None:
    world = World()
    launcher = make_launcher(world)
    launcher.start("bootstrap", ONE)
    launcher.start("prefill-0", ONE)
    assert len(world.system.reserved) == 1
    assert launcher.end("prefill-0", ONE)
    assert (world.system.reserved, world.system.living("prefill")) == ([], [])


def test_workers_that_do_not_fit_are_refused_before_anything_starts() -> None:
    world = World(FakeSystem([Machine(node_id="home", address="10.0.0.1", cpus=1, gpus=0)]))
    with pytest.raises(ConfigError, match="4 workers with 1 CPUs each"):
        make_launcher(world)
    assert world.system.log == []


def test_error_of_a_rank_names_it_and_user_errors_come_first() -> None:
    failed: dict[str, BaseException] = {
        "prefill-0 rank 0": RuntimeError("peer closed the connection"),
        "prefill-0 rank 1": UserError("no such folder"),
    }
    error = blame(failed)
    assert isinstance(error, UserError)
    assert str(error) == "prefill-0 rank 1: no such folder"
    del failed["prefill-0 rank 1"]
    error = blame(failed)
    assert not isinstance(error, UserError)
    assert str(error) == "prefill-0 rank 0: RuntimeError: peer closed the connection"
    assert str(blame({"a": PeerLostError("b is gone"), "b": RuntimeError("no memory")})) == "b: RuntimeError: no memory"


def test_gather_does_not_wait_for_the_others_after_an_error() -> None:
    never: Future[int] = Future()
    broken: Future[int] = Future()
    broken.set_exception(BatonError("broken"))
    with pytest.raises(BatonError, match=r"^b: broken$"):
        gather({"a": never, "b": broken}, Deadline(WAIT_S))
    with pytest.raises(BatonError, match=r"^a: not ready after 0.01 s \(resources.start_timeout_s\)$"):
        gather({"a": never}, Deadline(0.01))


def test_cpu_workers_and_services_see_no_gpu() -> None:
    assert worker_environ(CONFIG)["CUDA_VISIBLE_DEVICES"] == ""
    assert service_environ()["CUDA_VISIBLE_DEVICES"] == ""
    assert worker_environ(CONFIG)["OMP_NUM_THREADS"] == "1"


def test_torch_allocates_huge_pages_on_cpus_only() -> None:
    on_gpus = DeployConfig.model_validate({"resources": {"device": "cuda"}})
    assert worker_environ(CONFIG)["THP_MEM_ALLOC_ENABLE"] == "1"
    assert "THP_MEM_ALLOC_ENABLE" not in worker_environ(on_gpus)


def test_cluster_comes_up_is_drained_and_stops() -> None:
    driver = FakeDriver(World())
    assert driver.announced.wait(WAIT_S)
    driver.supervisor.request_stop("SIGINT")
    driver.ended.result(WAIT_S)
    assert driver.lines == ["SIGINT: draining; repeat to stop immediately", "drained: stopping"]
    assert driver.world.system.living("") == []
    assert driver.world.system.reserved == []


def test_workers_end_by_themselves_before_they_are_killed() -> None:
    driver = FakeDriver(World())
    assert driver.announced.wait(WAIT_S)
    driver.supervisor.request_stop("SIGINT")
    driver.ended.result(WAIT_S)
    for actor in driver.world.system.actors.values():
        if "rank" in actor.name:
            assert [call.exception() for call in actor.open] == [None] * len(actor.open)


def test_requests_that_do_not_end_do_not_hold_up_the_end() -> None:
    world = World()
    world.drains = False
    driver = FakeDriver(world)
    assert driver.announced.wait(WAIT_S)
    driver.supervisor.request_stop("SIGTERM")
    driver.ended.result(WAIT_S)
    assert driver.lines[-1] == "some open requests have not ended; stopping anyway"


def test_first_load_error_ends_the_start_and_is_reported_in_one_line() -> None:
    world = World()
    world.load_errors["prefill-0", 1] = UserError("model 'x' is no folder")
    driver = FakeDriver(world)
    with pytest.raises(UserError, match=r"^prefill-0 rank 1: model 'x' is no folder$"):
        driver.ended.result(WAIT_S)
    assert world.system.living("") == []
    assert not driver.announced.is_set()


MEETING = Rendezvous(bootstrap_url="http://127.0.0.1:1", token="token", channel_key=None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Patterns of the requested files, none of which exists."""
    patterns: list[str] = []

    def download(repository: str, *, allow_patterns: list[str], **_: list[str]) -> str:
        patterns.extend(allow_patterns)
        raise OSError(f"no {repository}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("cluster.launch.kinds.set_up_logs", lambda _: None)
    return patterns


def test_the_router_fetches_no_weights(asked: list[str]) -> None:
    log = ProcessLog(process="router", config=LogConfig())
    with pytest.raises(UserError, match="no owner/name"):
        RouterActor(log, {}, Incarnation(1), RouterShare()).start(DeployConfig(), "owner/name", MEETING, "127.0.0.1")
    assert "*.json" in asked
    assert not any("safetensors" in pattern for pattern in asked)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (torch.OutOfMemoryError("no memory"), "OutOfMemoryError: no memory"),
        (UserError("kv.memory_gib"), "kv.memory_gib"),
    ],
)
def test_the_driver_loads_no_library_to_read_an_error(error: Exception, text: str) -> None:
    def fail(_: object) -> NoReturn:
        raise error

    worker: Any = WorkerActor.__new__(WorkerActor)
    worker._worker = SimpleNamespace(load=fail)
    with pytest.raises(BatonError) as caught:
        worker.load("store")
    assert str(caught.value) == text
    assert b"torch" not in pickle.dumps(caught.value)
