"""Messages to replicas, which are sent together."""

import asyncio
from collections.abc import Callable

from cluster.channel import Outbox
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.messages import Message


class SendQueue:
    """Messages that are sent, in order, at the end of a pass of the event loop.

    ZeroMQ wakes a thread for a message that follows others after a while, which takes more time than the message.
    """

    def __init__(self, outbox: Outbox, on_unreachable: Callable[[str, Message, str], None]) -> None:
        """Create an empty queue; ``on_unreachable`` gets address, message and reason of each one that is not sent."""
        self._outbox = outbox
        self._on_unreachable = on_unreachable
        self._waiting: list[tuple[str, Message]] = []

    def send(self, address: str, message: Message) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append((address, message))

    def flush(self) -> None:
        """Send queued messages now."""
        waiting, self._waiting = self._waiting, []
        for address, message in waiting:
            try:
                self._outbox.send(address, message)
            except PeerUnreachableError as error:
                self._on_unreachable(address, message, str(error))
