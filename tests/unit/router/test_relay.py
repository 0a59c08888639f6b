"""Opening and leaving of answers."""

import asyncio
from typing import cast

from cluster.channel import Outbox
from cluster.spec.config import DeployConfig
from cluster.spec.messages import Cancel, Message, Submit
from router.directory import Breakers, Directory, LoadBook
from router.metrics import Metrics
from router.picker import Picker
from router.relay import Relay
from tests.fakes.bootstrap import entry_of, table_of
from tests.fakes.clock import ManualClock
from tests.fakes.dispatching import DECODE, PREFILL, ask, assert_empty, make

NUM_CHOICES = 150


class SentMessages:
    """Outbox that keeps messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, _address: str, message: Message) -> None:
        self.messages.append(message)

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.messages)


def test_an_answer_that_is_left_while_its_requests_are_being_sent_cancels_those_that_were() -> None:
    async def leave_and_drain() -> None:
        sent, table, directory = SentMessages(), make(), Directory(grace_s=1.0)
        directory.update(table_of(entry_of(PREFILL), entry_of(DECODE)), 0.0)
        config, clock = DeployConfig(), ManualClock()
        picker = Picker(config, directory, LoadBook(), Breakers())
        relay = Relay(config, table, directory, picker, cast(Outbox, sent), clock, Metrics())
        with relay.open([ask() for _ in range(NUM_CHOICES)]) as answer:
            num_sent = len(answer.choice_ids)
            assert 0 < num_sent < NUM_CHOICES
        await asyncio.wait_for(relay.drain(), 10.0)
        assert_empty(table)
        relay.stop()
        assert sent.count(Submit) == sent.count(Cancel) == 2 * num_sent

    asyncio.run(leave_and_drain())
