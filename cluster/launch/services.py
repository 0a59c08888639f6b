"""One start of the bootstrap service or of a router process: single actors on the home machine that need no
resources.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import httpx

from cluster.launch.kinds import router_environ, service_environ
from cluster.launch.tools import Tools
from cluster.launch.waits import Deadline, gather
from cluster.spec.config import DeployConfig
from cluster.spec.errors import BatonError
from cluster.spec.ids import Incarnation
from cluster.spec.messages import Drain
from cluster.spec.worker_spec import Rendezvous, RouterShare

BOOTSTRAP = "bootstrap"

_DRAIN_GRACE_S = 5.0
"""Time for the router to close after its own limit for open requests."""


class BootstrapProcess:
    """Process of the rank table."""

    def __init__(self, tools: Tools, incarnation: Incarnation) -> None:
        self._tools = tools
        self._actor = tools.system.start(
            tools.kinds.bootstrap, [service_environ()], name=f"{BOOTSTRAP}-{incarnation}", seat=None
        )
        self.runs: dict[str, Future[Any]] = {}

    def start(self, host: str, port: int, token: str, deadline: Deadline) -> str:
        """Serve; returns the base URL. Raises BatonError."""
        self._tools.progress(BOOTSTRAP, "starting")
        call = self._tools.system.call(self._actor, "start", host, port, token)
        url = str(gather({BOOTSTRAP: call}, deadline)[0])
        self.runs = {BOOTSTRAP: self._tools.system.call(self._actor, "run")}
        return url

    def kill(self, timeout_s: float) -> bool:
        """End the process; True when it is proven gone."""
        return self._tools.system.kill([self._actor], timeout_s)


class RouterProcess:
    """One process of the router."""

    def __init__(self, tools: Tools, incarnation: Incarnation, share: RouterShare) -> None:
        self._tools = tools
        self._name = share.name
        self.own_url = ""
        """URL of this process alone; empty before it serves."""
        arguments = [router_environ(os.environ), incarnation, share]
        self._actor = tools.system.start(tools.kinds.router, arguments, name=f"{share.name}-{incarnation}", seat=None)
        self._control: str | None = None
        self.runs: dict[str, Future[Any]] = {}

    def start(self, config: DeployConfig, model: str, rendezvous: Rendezvous, host: str, deadline: Deadline) -> str:
        """Serve; returns the base URL. Raises BatonError."""
        self._tools.progress(self._name, "starting")
        call = self._tools.system.call(self._actor, "start", config, model, rendezvous, host)
        url, self.own_url, self._control = gather({self._name: call}, deadline)[0]
        self.runs = {self._name: self._tools.system.call(self._actor, "run")}
        return str(url)

    def begin_drain(self) -> None:
        if self._control is not None:
            self._tools.tell([self._control], Drain())

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait for the open requests; True when all of them ended in time."""
        if self._control is None:
            return True
        try:
            return bool(self.runs[self._name].result(timeout_s + _DRAIN_GRACE_S))
        except (BatonError, FutureTimeoutError):
            return False

    def kill(self, timeout_s: float) -> bool:
        """End the process; True when it is proven gone."""
        return self._tools.system.kill([self._actor], timeout_s)


def follow_router(url: Callable[[], str], on_seen: Callable[[bool], None], timeout_s: float, interval_s: float) -> None:
    """Report whether a router process responds, at every change and repeatedly while it does not; never returns.

    Any response in time counts. The connection stays open, so that the driver does not queue behind a crowd of clients.
    """
    answered: bool | None = None
    with httpx.Client(timeout=timeout_s, trust_env=False) as http:
        while True:
            before, answered = answered, _answers(http, url())
            if not (before and answered):
                on_seen(answered)
            time.sleep(interval_s)


def _answers(http: httpx.Client, url: str) -> bool:
    try:
        http.get(f"{url}/health")
    except httpx.TransportError:
        return False
    return True
