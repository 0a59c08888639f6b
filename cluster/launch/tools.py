"""Dependencies of the launcher, for which tests substitute fakes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cluster.actors import ActorSystem
from cluster.bootstrap.client import BootstrapClient
from cluster.channel import Outbox
from cluster.launch.kinds import BootstrapActor, RouterActor, WorkerActor
from cluster.log_files import LogSession
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.messages import Message
from cluster.spec.registry import TableSnapshot
from cluster.spec.worker_spec import ChannelKey, Rendezvous


class Table(Protocol):
    """Connection of one thread to the rank table; implemented by BootstrapClient."""

    def watch(self, version: int, timeout_s: float) -> TableSnapshot | None: ...

    def unregister(self, replica: ReplicaId, incarnation: Incarnation, reaped: bool) -> None: ...

    def close(self) -> None: ...


Progress = Callable[[str, str], None]
"""Callback (member, stage) for progress; thread-safe."""
Send = Callable[[Sequence[str], Message], None]


def send(addresses: Sequence[str], message: Message, key: ChannelKey | None = None) -> None:
    """Send one message to several channel addresses; return once it has left, or after a second."""
    outbox = Outbox(key)
    for address in addresses:
        outbox.send(address, message)
    outbox.close()


def connect(rendezvous: Rendezvous) -> Table:
    return BootstrapClient(rendezvous.bootstrap_url, rendezvous.token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    system: ActorSystem
    progress: Progress
    worker: type = WorkerActor
    """Class of the worker actors; ``router`` and ``bootstrap`` are the classes of the services' actors."""
    router: type = RouterActor
    bootstrap: type = BootstrapActor
    send: Send = send
    channel_key: ChannelKey | None = None
    """Encryption key of all channels; ``send`` already uses it."""
    connect: Callable[[Rendezvous], Table] = connect
    session: LogSession | None = None
    """Session of the processes' log files. None for no files."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Environment variables with secrets, for the router only."""
