"""Classes that run inside the actors: plain wrappers of Worker, RouterServer and BootstrapServer.

Constructors only import modules, which takes seconds for a worker and overlaps with the startup of the bootstrap
service. Heavy imports stay inside the methods, so that the process that starts actors never loads torch.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.logs import ProcessLog, set_up_logs
from cluster.processes import freeze_loaded_objects, start_trimming
from cluster.spec.config import DeployConfig, Device
from cluster.spec.env import ADMIN_KEY, API_KEYS, take_secrets
from cluster.spec.errors import BatonError
from cluster.spec.ids import Incarnation
from cluster.spec.registry import RankRecord
from cluster.spec.worker_spec import Rendezvous, RouterShare, WorkerSpec

if TYPE_CHECKING:
    from router.server import RouterServer
    from workers.worker import Worker


class _LoggingActor:
    """Process that logs to its own file, under a name that Ray shows too."""

    def __init__(self, log: ProcessLog, environ: Mapping[str, str]) -> None:
        os.environ.update(environ)
        set_up_logs(log)
        start_trimming()
        self._log = log

    def __repr__(self) -> str:
        return self._log.process


@contextmanager
def _errors_as_text() -> Iterator[None]:
    """Raise the errors of libraries as a BatonError. To unpickle them, the driver would load torch."""
    try:
        yield
    except BatonError:
        raise
    except Exception as error:
        raise BatonError(f"{type(error).__name__}: {error}") from error


class WorkerActor(_LoggingActor):
    """One worker. ``run`` blocks until the worker receives Shutdown on its own channel."""

    def __init__(self, log: ProcessLog, environ: Mapping[str, str]) -> None:
        take_secrets()  # a job's processes inherit those of the job
        super().__init__(log, environ)
        import workers.worker  # noqa: F401

        self._folder: Path | None = None
        self._worker: Worker | None = None

    def fetch(self, model: str) -> None:
        """Download the model to this machine; the hub's locks keep several processes from downloading it at once."""
        from workers.models.resolve import resolve_model

        self._folder = resolve_model(model)

    def build(self, spec: WorkerSpec, rendezvous: Rendezvous) -> None:
        """Create the worker; requires a call of ``fetch`` first."""
        from workers.worker import Worker

        assert self._folder is not None, "fetch the model before building the worker"
        self._worker = Worker(spec, self._folder, rendezvous)

    @_errors_as_text()
    def open_store(self) -> str:
        return self._built.open_store()

    @_errors_as_text()
    def load(self, store: str) -> RankRecord:
        record = self._built.load(store)
        freeze_loaded_objects()
        return record

    @_errors_as_text()
    def run(self, records: list[RankRecord]) -> None:
        """Run the worker, then release its resources; a hanging loop ends the process."""
        from workers.loop.watch import LoopWatch, end_process

        worker, spec = self._built, self._built.spec
        name, limit_s = self._log.process, spec.config.resources.step_timeout_s
        try:
            with LoopWatch(worker.progress, name, limit_s, end_process):
                worker.run(records)
        finally:
            worker.close()

    @property
    def _built(self) -> "Worker":
        assert self._worker is not None, "build the worker before using it"
        return self._worker


class RouterActor(_LoggingActor):
    """Router, which finishes the open requests and ends after Drain on its channel."""

    def __init__(
        self, log: ProcessLog, environ: Mapping[str, str], incarnation: Incarnation, share: RouterShare
    ) -> None:
        super().__init__(log, environ)
        import router.server  # noqa: F401

        self._incarnation = incarnation
        self._share = share
        self._server: RouterServer | None = None

    def start(self, config: DeployConfig, model: str, rendezvous: Rendezvous, host: str) -> tuple[str, str]:
        """Start serving; return the base URL and the channel address."""
        from router.server import RouterServer
        from workers.models.resolve import DESCRIPTION, resolve_model

        folder = resolve_model(model, DESCRIPTION)
        self._server = server = RouterServer(config, folder, rendezvous, host, self._incarnation, share=self._share)
        take_secrets()  # the router has read them
        url = server.start()
        server.start_preprocessing()
        freeze_loaded_objects()
        return url, server.address

    def run(self) -> bool:
        """Block until the router has ended; return whether a drain finished all open requests."""
        assert self._server is not None, "start the router before running it"
        return self._server.run()


class BootstrapActor(_LoggingActor):
    def __init__(self, log: ProcessLog, environ: Mapping[str, str]) -> None:
        take_secrets()  # a job's processes inherit those of the job
        super().__init__(log, environ)
        import cluster.bootstrap.service  # noqa: F401

    def start(self, host: str, port: int, token: str) -> str:
        from cluster.bootstrap.service import BootstrapServer

        self._server = BootstrapServer(host, port, token)
        return self._server.start()

    def run(self) -> None:
        self._server.run()


def worker_environ(config: DeployConfig) -> dict[str, str]:
    """Return a worker's environment variables: its thread count and, if it computes on the CPU, no visible GPUs, and
    huge pages for what torch allocates until the weights are loaded.
    """
    environ = {"OMP_NUM_THREADS": str(config.resources.threads_per_worker), "TOKENIZERS_PARALLELISM": "false"}
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", "THP_MEM_ALLOC_ENABLE": "1"}
    return environ | (on_cpu if config.resources.device is Device.CPU else {})


def service_environ() -> dict[str, str]:
    """Return a service's environment variables, which hide all GPUs, because Ray hides none if none is requested."""
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}


def router_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a router's environment variables: a service's, plus the driver's API keys and OpenTelemetry settings."""
    keys = (ADMIN_KEY.name, API_KEYS.name)
    return service_environ() | {name: environ[name] for name in environ if name in keys or name.startswith("OTEL_")}
