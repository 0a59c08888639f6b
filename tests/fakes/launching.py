"""Launcher of fake processes, and a supervisor in a thread."""

import threading
from concurrent.futures import Future

from cluster.launch.launcher import Launcher
from cluster.launch.tools import Tools
from cluster.spec.config import (
    DecodeConfig,
    DeployConfig,
    ParallelConfig,
    PrefillConfig,
    ResourcesConfig,
)
from cluster.spec.ids import Incarnation
from cluster.supervisor.events import Failed
from cluster.supervisor.loop import Supervisor
from tests.fakes.ray import World

CONFIG = DeployConfig(
    prefill=PrefillConfig(parallel=ParallelConfig(cp=2)),
    decode=DecodeConfig(replicas=2),
    resources=ResourcesConfig(start_timeout_s=10.0),
)
ONE = Incarnation(1)
WAIT_S = 60.0


class Driver:
    def __init__(self, tools: Tools, config: DeployConfig = CONFIG, model: str = "model") -> None:
        self.lines: list[str] = []
        self.announced = threading.Event()
        self.supervisor = Supervisor(0.01, self.announced.set, self.lines.append)
        self.launcher = Launcher(
            tools, config, model, "token-of-the-test", lambda *failure: self.supervisor.post(Failed(*failure))
        )
        self.ended: Future[None] = Future()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self.supervisor.run(self.launcher)
        except BaseException as error:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)


class FakeDriver(Driver):
    def __init__(self, world: World) -> None:
        self.world = world
        super().__init__(world.tools())


def start_all(launcher: Launcher) -> None:
    threads = [threading.Thread(target=launcher.start, args=(name, ONE)) for name in launcher.names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)


def make_launcher(world: World, ended: list[str] | None = None) -> Launcher:
    errors = [] if ended is None else ended
    return Launcher(world.tools(), CONFIG, "model", "token", lambda name, _, error: errors.append(f"{name}: {error}"))
