"""Between inbox and reader: nothing waits, nothing is lost, nothing is reordered."""

import asyncio

import pytest

from cluster.spec.ids import Room
from cluster.spec.sampling import FinishReason
from router.actions import Cause, Fail
from router.errors import RequestFailedError
from router.stream import Part, Stream


async def test_what_a_slow_reader_leaves_is_joined() -> None:
    stream = Stream(2)
    stream.push(0, [1], None)
    stream.push(1, [7], FinishReason.STOP)
    stream.push(0, [2, 3], None)
    assert await stream.receive() == [Part(0, [1, 2, 3], None), Part(1, [7], FinishReason.STOP)]
    stream.push(0, [], FinishReason.LENGTH)
    assert await stream.receive() == [Part(0, [], FinishReason.LENGTH)]
    assert await stream.receive() == []


async def test_a_reader_waits_for_news() -> None:
    stream = Stream(1)
    waiting = asyncio.create_task(stream.receive())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.push(0, [1], None)
    assert await waiting == [Part(0, [1], None)]


async def test_a_choice_that_the_reader_finished() -> None:
    stream = Stream(1)
    stream.push(0, [1], None)
    await stream.receive()
    stream.push(0, [2], FinishReason.LENGTH)
    stream.finish(0)
    assert await stream.receive() == []


async def test_failure() -> None:
    stream = Stream(1)
    stream.fail(Fail(room=Room(1), cause=Cause.REPLICA_LOST, reason="decode-0 is gone"))
    with pytest.raises(RequestFailedError, match="decode-0 is gone") as caught:
        await stream.receive()
    assert caught.value.cause is Cause.REPLICA_LOST
