"""Dependencies of launching: processes, messages, the rank table, and progress reports. Tests substitute fakes."""

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
    """Connection of one thread to the rank table; implemented by BootstrapClient."""

    def watch(self, version: int, timeout_s: float) -> TableSnapshot | None: ...

    def unregister(self, replica: ReplicaId, incarnation: Incarnation, reaped: bool) -> None: ...

    def close(self) -> None: ...


Progress = Callable[[str, str], None]
"""Callback for the stage that a member has reached; thread-safe."""
Tell = Callable[[Sequence[str], Message], None]
"""Function that sends one message to several channel addresses."""


def tell(addresses: Sequence[str], message: Message, key: ChannelKey | None = None) -> None:
    """Send one message to several channel addresses; returns when it has left, or after a second."""
    from cluster.channel import Outbox

    outbox = Outbox(key)
    for address in addresses:
        outbox.send(address, message)
    outbox.close()


def connect(rendezvous: Rendezvous) -> Table:
    from cluster.bootstrap.client import BootstrapClient

    return BootstrapClient(rendezvous.bootstrap_url, rendezvous.token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Dependencies in one object."""

    system: ActorSystem
    progress: Progress
    kinds: ActorKinds = field(default_factory=ActorKinds)
    tell: Tell = tell
    channel_key: ChannelKey | None = None
    """Channel key for all processes; ``tell`` already holds it."""
    connect: Callable[[Rendezvous], Table] = connect
