"""What launching needs from outside: processes, messages, the rank table, somebody to report to. Tests give fakes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cluster.actors import ActorSystem
from cluster.launch.kinds import ActorKinds
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.messages import Message
from cluster.spec.registry import TableSnapshot
from cluster.spec.worker_spec import ChannelKey, Rendezvous


class Table(Protocol):
    """One thread's connection to the rank table; BootstrapClient is one."""

    def watch(self, version: int, timeout_s: float) -> TableSnapshot | None:
        """See BootstrapClient.watch."""
        ...

    def unregister(self, replica: ReplicaId, incarnation: Incarnation, reaped: bool) -> None:
        """See BootstrapClient.unregister."""
        ...

    def close(self) -> None:
        """See BootstrapClient.close."""
        ...


Progress = Callable[[str, str], None]
"""Told which member has reached which stage; from any thread."""
Tell = Callable[[Sequence[str], Message], None]
"""Sends one message to several channel addresses."""


def tell(addresses: Sequence[str], message: Message, key: ChannelKey | None = None) -> None:
    """Send one message to several channel addresses; returns when it has left, or after a second."""
    from cluster.channel import Outbox

    outbox = Outbox(key)
    for address in addresses:
        outbox.send(address, message)
    outbox.close()


def connect(rendezvous: Rendezvous) -> Table:
    """A connection to the cluster's bootstrap service."""
    from cluster.bootstrap.client import BootstrapClient

    return BootstrapClient(rendezvous.bootstrap_url, rendezvous.token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """All of it."""

    system: ActorSystem
    progress: Progress
    kinds: ActorKinds = field(default_factory=ActorKinds)
    tell: Tell = tell
    channel_key: ChannelKey | None = None
    """What all processes get, and ``tell`` has."""
    connect: Callable[[Rendezvous], Table] = connect
