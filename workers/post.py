"""Sending messages, with different handling of unreachable peers."""

import logging
from collections.abc import Iterable
from typing import Protocol

from cluster.channel import Outbox
from cluster.spec.errors import PeerLostError, PeerUnreachableError
from cluster.spec.messages import Message

_log = logging.getLogger(__name__)


class Post(Protocol):
    """Methods of ``Outbox`` that send to one address."""

    def send(self, address: str, message: Message) -> None: ...
    def close(self) -> None: ...


def send_or_log(post: Post, address: str, message: Message) -> None:
    """Send a message. If the peer does not listen, only log, since leases and deadlines handle lost peers."""
    try:
        post.send(address, message)
    except PeerUnreachableError as error:
        _log.warning("%s", error)


def send_to_ranks(outbox: Outbox, addresses: Iterable[str], message: Message) -> None:
    """Send to other ranks of the same replica. Raise PeerLostError if one no longer listens."""
    try:
        outbox.broadcast(addresses, message)
    except PeerUnreachableError as error:
        raise PeerLostError(str(error)) from error
