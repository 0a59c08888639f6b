"""Router in a separate process with a constant rank table, called through WorkerProcess."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from cluster.processes import freeze_loaded_objects
from cluster.spec.config import DeployConfig
from cluster.spec.ids import Incarnation
from cluster.spec.registry import TableSnapshot
from cluster.spec.worker_spec import ALONE, Rendezvous, RouterShare
from router.server import RouterServer


class RouterHost:
    """Router process that serves until ``close``."""

    def __init__(
        self, config: DeployConfig, model_folder: Path, table: TableSnapshot, share: RouterShare = ALONE
    ) -> None:
        async def watch(url: str, token: str, poll_s: Callable[[], float]) -> AsyncIterator[TableSnapshot | None]:
            del url, token, poll_s
            yield table
            await asyncio.Event().wait()

        nowhere = Rendezvous(bootstrap_url="", token="")
        self._server = RouterServer(
            config, model_folder, nowhere, "127.0.0.1", Incarnation(1), watch=watch, share=share
        )

    def start(self) -> str:
        """Start serving. Return the base URL."""
        url = self._server.start()
        freeze_loaded_objects()
        return url

    def cpu_s(self) -> float:
        """Return this process's CPU time so far."""
        return time.process_time()

    def close(self) -> None:
        self._server.stop()
