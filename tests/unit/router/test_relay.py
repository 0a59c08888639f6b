"""Opening and leaving of answers."""

import asyncio
import time
from typing import cast

import pytest
import uvloop

from cluster.channel import Outbox
from cluster.spec.clock import Clock, SystemClock
from cluster.spec.config import DeployConfig
from cluster.spec.messages import Cancel, Message, Submit
from cluster.spec.router_config import RouterConfig
from router.directory import Breakers, Directory, LoadBook
from router.dispatch import RequestTable
from router.errors import RequestFailedError
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


def make_relay(sent: SentMessages, table: RequestTable, clock: Clock, config: DeployConfig) -> Relay:
    directory = Directory(grace_s=1.0)
    directory.update(table_of(entry_of(PREFILL), entry_of(DECODE)), 0.0)
    picker = Picker(config, directory, LoadBook(), Breakers())
    return Relay(config, table, directory, picker, cast(Outbox, sent), clock, Metrics())


def test_an_answer_that_is_left_while_its_requests_are_being_sent_cancels_those_that_were() -> None:
    async def leave_and_drain() -> None:
        sent, table = SentMessages(), make()
        relay = make_relay(sent, table, ManualClock(), DeployConfig())
        with relay.open([ask() for _ in range(NUM_CHOICES)]) as answer:
            num_sent = len(answer.choice_ids)
            assert 0 < num_sent < NUM_CHOICES
        await asyncio.wait_for(relay.drain(), 10.0)
        assert_empty(table)
        relay.stop()
        assert sent.count(Submit) == sent.count(Cancel) == 2 * num_sent

    asyncio.run(leave_and_drain())


class SlowClock(SystemClock):
    """Clock of a busy machine, where a millisecond has passed before a timer is set."""

    def now_s(self) -> float:
        time.sleep(0.002)
        return super().now_s()


def test_a_deadline_that_is_due_before_its_timer_is_set_only_fails_its_request() -> None:
    async def open_two() -> None:
        table = make()
        config = DeployConfig(router=RouterConfig(request_timeout_s=0.001))
        relay = make_relay(SentMessages(), table, SlowClock(), config)
        with relay.open([ask()]) as first, relay.open([ask()]) as second:
            for answer in (first, second):
                with pytest.raises(RequestFailedError, match="not finished before"):
                    await answer.receive()
        assert_empty(table)
        relay.stop()

    uvloop.run(open_two())
