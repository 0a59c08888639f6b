"""Real Ray: a cluster without models starts, loses a rank, restarts the replica, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import httpx
import pytest

from cluster.actors import Bundle
from cluster.bootstrap.client import BootstrapClient
from cluster.launch.tools import Tools
from cluster.processes import ProcessId, is_alive, this_process, wait_gone
from cluster.ray_system.environ import set_for_own_cluster
from cluster.spec.config import DeployConfig, ParallelConfig, PrefillConfig, ResourcesConfig
from cluster.spec.errors import BatonError, PeerUnreachableError, UserError
from cluster.spec.ids import ReplicaId
from cluster.spec.registry import ReplicaEntry
from tests.fakes.cluster import listened_hosts
from tests.fakes.launching import Driver
from tests.fakes.members import QuietRouter, QuietWorker
from tests.fakes.waits import wait_until

if TYPE_CHECKING:
    from cluster.ray_system.adapter import RaySystem

pytestmark = pytest.mark.integration

CONFIG = DeployConfig(
    name="quiet",
    prefill=PrefillConfig(parallel=ParallelConfig(cp=2)),
    resources=ResourcesConfig(cpus_per_worker=0.5, start_timeout_s=60.0),
)
P0 = ReplicaId("prefill-0")
WAIT_S = 60.0


@pytest.fixture(scope="module")
def ray_system() -> Iterator["RaySystem"]:
    set_for_own_cluster()
    from cluster.ray_system.adapter import RaySystem

    others = set(_children())
    with RaySystem("baton-quiet", None, num_cpus=2, worker_logs=False, has_dashboard=True) as system:
        yield system
        temp_dir = system.temp_dir
        assert temp_dir is not None
        ray_processes = [process for process in _children() if process not in others]
        assert ray_processes
    assert wait_gone(ray_processes, WAIT_S)
    assert not temp_dir.exists()


class Plain:
    """Plain class for an actor."""

    def __init__(self, greeting: str) -> None:
        if not greeting:
            raise UserError("greeting: got ''; allowed: any other text")
        self._greeting = greeting

    def greet(self, name: str) -> str:
        return f"{self._greeting} {name}"

    def process(self) -> ProcessId:
        return this_process()

    def fail(self) -> None:
        raise UserError("no such folder")

    def block(self) -> None:
        threading.Event().wait()


def _children() -> list[ProcessId]:
    """Return every descendant of this process, beginning with Ray's daemons."""
    tree: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        tree.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, todo = [], [os.getpid()]
    while todo:
        below = tree.get(todo.pop(), [])
        found += below
        todo += below
    return [process for pid in found if (process := _process(pid))]


def _process(pid: int) -> ProcessId | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return ProcessId(pid=pid, start_ticks=int(fields[19]))


def test_ray_can_be_reached_by_this_machine_and_account_only(ray_system: "RaySystem") -> None:
    actor = ray_system.start(Plain, ["hello"], name="listening", title="listening", bundle=None)
    ray_system.call(actor, "process").result(WAIT_S)
    assert listened_hosts({process.pid for process in _children()}) == {"127.0.0.1"}
    assert ray_system.temp_dir is not None
    assert ray_system.temp_dir.stat().st_mode & 0o777 == 0o700
    assert {each.name: each.stat().st_mode & 0o077 for each in ray_system.temp_dir.iterdir() if each.name != "ray"} == {
        "token": 0
    }
    ray_system.kill([actor], WAIT_S)


def test_rays_own_tools_reach_the_cluster(ray_system: "RaySystem") -> None:
    actor = ray_system.start(Plain, ["hello"], name="seen", title="seen", bundle=None)
    ray_system.call(actor, "process").result(WAIT_S)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}

    def ask(*command: str) -> str:
        command = (str(Path(sys.executable).with_name("ray")), *command)
        environ = plain | ray_system.environ
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=WAIT_S).stdout

    assert "2.0 CPU" in ask("status")
    assert re.search(r"\bPlain\b.*\bALIVE\b.*\bseen\b", ask("list", "actors"))
    token = Path(ray_system.environ["RAY_AUTH_TOKEN_PATH"]).read_text()
    page = f"{ray_system.dashboard_url}/api/version"
    assert httpx.get(page).status_code == 401
    assert httpx.get(page, headers={"Authorization": f"Bearer {token}"}).status_code == 200
    ray_system.kill([actor], WAIT_S)


def test_plain_class_runs_in_a_process_of_its_own(ray_system: "RaySystem") -> None:
    actor = ray_system.start(Plain, ["hello"], name="plain", title="plain", bundle=None)
    assert ray_system.call(actor, "greet", "you").result(WAIT_S) == "hello you"
    process = ray_system.call(actor, "process").result(WAIT_S)
    assert process.pid != os.getpid()
    assert is_alive(process)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    assert ray_system.taken_names() == ["plain"]
    blocked = ray_system.call(actor, "block")
    assert ray_system.kill([actor], WAIT_S)
    assert not is_alive(process)
    with pytest.raises(PeerUnreachableError, match="the process of plain died"):
        blocked.result(WAIT_S)


def test_a_kill_that_lasts_longer_than_ray_fails(ray_system: "RaySystem", monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop that may not wait leaves Ray while threads still end processes."""
    import ray
    from ray.exceptions import RayError

    actor = ray_system.start(Plain, ["hello"], name="left", title="left", bundle=None)
    ray_system.call(actor, "process").result(WAIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(ray, "kill", Mock(side_effect=RayError("Ray has not been started yet.")))
        assert not ray_system.kill([actor], WAIT_S)
    assert ray_system.kill([actor], WAIT_S)


def test_memory_is_named_as_the_cause_when_ray_kills_a_process_for_it() -> None:
    from ray.exceptions import OutOfMemoryError

    from cluster.ray_system.adapter import _translated

    rays: Future[None] = Future()
    killed = OutOfMemoryError("1 worker(s) were killed due to the node running low on memory.")  # type: ignore[no-untyped-call]
    rays.set_exception(killed)
    with pytest.raises(PeerUnreachableError, match="Ray killed the process of cp1, because memory of its machine"):
        _translated("cp1", rays).result(WAIT_S)


def test_errors_are_returned_as_raised(ray_system: "RaySystem") -> None:
    actor = ray_system.start(Plain, ["hello"], name="failing", title="failing", bundle=None)
    with pytest.raises(UserError) as caught:
        ray_system.call(actor, "fail").result(WAIT_S)
    assert str(caught.value) == "no such folder"
    assert "in fail" in "".join(caught.value.__notes__)
    broken = ray_system.start(Plain, [""], name="broken", title="broken", bundle=None)
    with pytest.raises(UserError, match=r"^greeting: got ''"):
        ray_system.call(broken, "greet", "you").result(WAIT_S)
    ray_system.kill([actor, broken], WAIT_S)


LATE = """
import sys
from pathlib import Path
from cluster.ray_system.environ import set_for_own_cluster
set_for_own_cluster()
from cluster.ray_system import adapter
from cluster.spec.errors import BatonError
from tests.fakes.waits import wait_until

start, num_late, folders = adapter.start_ray, int(sys.argv[1]), []

def late(num_cpus, temp_dir, guard, common, has_dashboard):
    folders.append(temp_dir)
    if num_late < adapter.START_TRIES:
        start(num_cpus, temp_dir, guard, common, has_dashboard=has_dashboard)
    if len(folders) <= num_late:
        raise Exception("The current node timed out.\\nMore.")
    return ""

adapter.start_ray = late
try:
    with adapter.RaySystem("baton-late", None, num_cpus=1, worker_logs=False, has_dashboard=False) as system:
        print(len(system.machines()), "machine after", len(folders), [folder.exists() for folder in folders])
except BatonError as error:
    print(error)
print([folder.exists() for folder in folders])
"""


def start_late(num_late: int) -> list[str]:
    """Return the messages if Ray's first starts time out. Runs in a new process, because Ray starts once only."""
    command = [sys.executable, "-c", LATE, str(num_late)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S).stdout.splitlines()


def test_a_slow_start_is_retried_without_leftovers() -> None:
    assert start_late(1) == ["1 machine after 2 [False, True]", "[False, False]"]


def test_slow_starts_are_reported_in_one_line() -> None:
    advice = "try again when this machine is less busy, or check it with `baton doctor`"
    waited = "Ray did not start within 0 s in 2 attempts (The current node timed out.)"
    assert start_late(2) == [f"{waited}; {advice}", "[False, False]"]


def test_an_impossible_reservation_names_requested_and_available_resources(ray_system: "RaySystem") -> None:
    bundle = Bundle(node_id=ray_system.home.node_id, cpus=64.0, gpus=0.0)
    with pytest.raises(UserError, match=r"big: no capacity within 0.5 s") as caught:
        ray_system.reserve("big", [bundle], timeout_s=0.5)
    reported = f"{ray_system.home.address}: wanted 64 CPUs and 0 GPUs; free: 2 CPUs and 0 GPUs"
    assert str(caught.value) == f"big: no capacity within 0.5 s; {reported}"


def drive(system: "RaySystem", model: str) -> Driver:
    tools = Tools(system=system, progress=lambda *_: None, worker=QuietWorker, router=QuietRouter)
    return Driver(tools, CONFIG, model)


def _prefill(table: BootstrapClient) -> ReplicaEntry:
    found = table.table().find(P0)
    assert found is not None
    return found


def test_killed_rank_restarts_its_replica_and_shutdown_leaves_nothing(ray_system: "RaySystem") -> None:
    driver = drive(ray_system, "model")
    assert driver.announced.wait(WAIT_S), driver.lines
    meeting = driver.launcher.rendezvous.result()
    table = BootstrapClient(meeting.bootstrap_url, meeting.token)
    first = _prefill(table)
    pids = [int(record.endpoint.session) for record in first.ranks]
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: any("prefill-0: running, incarnation" in line for line in driver.lines))
    second = _prefill(table)
    assert second.ready
    assert second.incarnation > first.incarnation
    assert not set(pids) & {int(record.endpoint.session) for record in second.ranks}
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert table.table().reaped[P0] == first.incarnation
    assert "prefill-0 rank 1: the process of" in driver.lines[0]
    table.close()

    driver.supervisor.request_stop("SIGINT")
    driver.ended.result(WAIT_S)
    assert driver.lines[-2:] == ["SIGINT: draining; repeat to stop immediately", "drained: stopping"]
    wait_until(lambda: ray_system.taken_names() == [])
    wait_until(lambda: ray_system.home.cpus == 2.0)


def test_first_error_of_a_rank_is_reported_and_the_replica_torn_down(ray_system: "RaySystem") -> None:
    driver = drive(ray_system, "broken")
    with pytest.raises(BatonError) as caught:
        driver.ended.result(WAIT_S)
    assert str(caught.value) == "prefill-0 rank 1: ValueError: rank 1 cannot load, store 127.0.0.1"
    assert not driver.announced.is_set()
    wait_until(lambda: ray_system.taken_names() == [])
