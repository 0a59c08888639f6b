"""Messages that wait for the end of a pass of the event loop."""

import asyncio
from typing import cast

from cluster.channel import Outbox
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.messages import CheckHealth, Message
from router.send_queue import SendQueue


class Post:
    """Outbox that reaches every address but ``nowhere``."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []

    def send(self, address: str, message: Message) -> None:
        if address == "nowhere":
            raise PeerUnreachableError("nobody listens")
        self.sent.append((address, message))


FIRST, SECOND, THIRD = (cast(Message, CheckHealth(reply_to=reason)) for reason in ("1", "2", "3"))


async def test_messages_leave_in_order_at_the_end_of_a_pass() -> None:
    queue = SendQueue(cast(Outbox, post := Post()), lambda *_: None)
    queue.send("a", FIRST)
    queue.send("b", SECOND)
    queue.send("a", THIRD)
    assert post.sent == []
    await asyncio.sleep(0)
    assert post.sent == [("a", FIRST), ("b", SECOND), ("a", THIRD)]
    queue.send("a", FIRST)
    await asyncio.sleep(0)
    assert len(post.sent) == 4


async def test_messages_can_leave_at_once() -> None:
    queue = SendQueue(cast(Outbox, post := Post()), lambda *_: None)
    queue.send("a", FIRST)
    queue.flush()
    await asyncio.sleep(0)
    assert post.sent == [("a", FIRST)]


async def test_what_follows_a_message_that_is_not_sent_is_sent_after_the_reaction() -> None:
    """A request whose Submit reaches only one of its replicas is cancelled there, after the Submit."""
    post, told = Post(), list[tuple[str, Message, str]]()

    def react(address: str, message: Message, reason: str) -> None:
        told.append((address, message, reason))
        queue.send("a", THIRD)

    queue = SendQueue(cast(Outbox, post), react)
    queue.send("nowhere", FIRST)
    queue.send("a", SECOND)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert told == [("nowhere", FIRST, "nobody listens")]
    assert post.sent == [("a", SECOND), ("a", THIRD)]
