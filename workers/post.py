"""What takes messages to other processes."""

import logging
from typing import Protocol

from cluster.spec.errors import PeerUnreachableError
from cluster.spec.messages import Message

_log = logging.getLogger(__name__)


class Post(Protocol):
    """``Outbox`` does."""

    def send(self, address: str, message: Message) -> None: ...
    def close(self) -> None: ...


def send_if_heard(post: Post, address: str, message: Message) -> None:
    """A peer that does not listen is the business of leases and deadlines."""
    try:
        post.send(address, message)
    except PeerUnreachableError as error:
        _log.warning("%s", error)
