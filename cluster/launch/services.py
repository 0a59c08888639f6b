"""Processes of the bootstrap service and of the router."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing
from typing import Any

from cluster.channel import Inbox, Outbox
from cluster.launch.kinds import router_environ, service_environ
from cluster.launch.tools import Tools
from cluster.launch.waits import Deadline, gather
from cluster.logs import ProcessLog
from cluster.spec.clock import HEARTBEAT_S, LEASE_S
from cluster.spec.config import DeployConfig, LogConfig
from cluster.spec.errors import BatonError, PeerUnreachableError
from cluster.spec.ids import Incarnation
from cluster.spec.messages import CheckHealth, Drain
from cluster.spec.worker_spec import ChannelKey, Rendezvous, RouterShare

BOOTSTRAP = "bootstrap"

_DRAIN_GRACE_S = 5.0
"""Additional time for the router to close after its drain timeout."""


class _Service:
    """Process of a single actor, which runs on the home machine and reserves no resources."""

    def __init__(
        self,
        tools: Tools,
        name: str,
        incarnation: Incarnation,
        log_config: LogConfig,
        actor_class: type,
        arguments: Sequence[object],
    ) -> None:
        self._tools = tools
        self._name = name
        log = ProcessLog(process=name, config=log_config, session=tools.session)
        self._actor = tools.system.start(
            actor_class, [log, *arguments], name=f"{name}-{incarnation}", title=name, bundle=None
        )
        self.runs: dict[str, Future[Any]] = {}

    def kill(self, timeout_s: float) -> bool:
        """End the process; return whether it is confirmed dead."""
        return self._tools.system.kill([self._actor], timeout_s)

    def lives(self, timeout_s: float) -> bool:
        return self._tools.system.live([self._actor], timeout_s)

    def _serve(self, deadline: Deadline, *arguments: object) -> Any:
        """Call the actor's ``start``, then ``run``; return the result of ``start``. Raises BatonError."""
        self._tools.progress(self._name, "starting")
        call = self._tools.system.call(self._actor, "start", *arguments)
        result = gather({self._name: call}, deadline)[0]
        self.runs = {self._name: self._tools.system.call(self._actor, "run")}
        return result


class BootstrapProcess(_Service):
    def __init__(self, tools: Tools, incarnation: Incarnation, log_config: LogConfig) -> None:
        super().__init__(tools, BOOTSTRAP, incarnation, log_config, tools.bootstrap, [service_environ()])

    def start(self, host: str, port: int, token: str, deadline: Deadline) -> str:
        """Start serving; return the base URL. Raises BatonError."""
        return str(self._serve(deadline, host, port, token))


class RouterProcess(_Service):
    def __init__(self, tools: Tools, incarnation: Incarnation, share: RouterShare, log_config: LogConfig) -> None:
        arguments = [router_environ(os.environ | dict(tools.secrets)), incarnation, share]
        super().__init__(tools, share.name, incarnation, log_config, tools.router, arguments)
        self.address = ""
        """Channel address; empty before the router serves."""

    def start(self, config: DeployConfig, model: str, rendezvous: Rendezvous, host: str, deadline: Deadline) -> str:
        """Start serving; return the base URL. Raises BatonError."""
        url, self.address = self._serve(deadline, config, model, rendezvous, host)
        return str(url)

    def begin_drain(self) -> None:
        if self.address:
            self._tools.send([self.address], Drain())

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait for the open requests; return whether all of them ended in time."""
        if not self.address:
            return True
        try:
            return bool(self.runs[self._name].result(timeout_s + _DRAIN_GRACE_S))
        except (BatonError, FutureTimeoutError):
            return False


def follow_router(
    address: Callable[[], str], host: str, key: ChannelKey | None, on_seen: Callable[[bool], None]
) -> None:
    """Call ``on_seen`` with whether a router process responds, on every change and at each check without a response.

    Never returns. The check uses the channel, which no crowd of clients can delay and only holders of the key can use.

    Args:
        address: returns the router's channel address.
        host: address of this machine to which the router responds.
    """
    answered: bool | None = None
    with closing(Inbox(host, key)) as inbox, closing(Outbox(key)) as outbox:
        while True:
            before, answered = answered, _answers(inbox, outbox, address())
            if not (before and answered):
                on_seen(answered)
            time.sleep(HEARTBEAT_S)


def _answers(inbox: Inbox, outbox: Outbox, address: str) -> bool:
    inbox.receive(0)  # answers that came too late
    try:
        outbox.send(address, CheckHealth(reply_to=inbox.address))
    except PeerUnreachableError:  # the queue to a process that has ended is full
        return False
    return bool(inbox.receive(LEASE_S))
