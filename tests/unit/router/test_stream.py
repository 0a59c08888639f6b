"""Outputs reach the reader of an answer in order and without loss."""

import asyncio

import pytest

from cluster.spec.sampling import FinishReason
from router.answer import Answer
from router.errors import RequestFailedError
from router.request import Cause, ChoiceId, FailRequest, OutputBatch
from tests.fakes.dispatching import ask


def answer_of(num_choices: int) -> Answer:
    return Answer([ask() for _ in range(num_choices)], lambda _: None, lambda _: None)


def push(answer: Answer, index: int, token_ids: list[int], finish: FinishReason | None = None) -> None:
    answer.push(index, batch(token_ids, finish))


def batch(token_ids: list[int], finish: FinishReason | None = None) -> OutputBatch:
    return OutputBatch(choice_id=ChoiceId(1), token_ids=token_ids, finish=finish)


async def test_outputs_for_a_slow_reader_are_merged() -> None:
    answer = answer_of(2)
    push(answer, 0, [1])
    push(answer, 1, [7], FinishReason.STOP)
    push(answer, 0, [2, 3])
    assert await answer.receive() == [(0, batch([1, 2, 3])), (1, batch([7], FinishReason.STOP))]
    push(answer, 0, [], FinishReason.LENGTH)
    assert await answer.receive() == [(0, batch([], FinishReason.LENGTH))]
    assert await answer.receive() == []
    assert answer.num_tokens == 4


async def test_a_reader_waits_for_output() -> None:
    answer = answer_of(1)
    waiting = asyncio.create_task(answer.receive())
    await asyncio.sleep(0)
    assert not waiting.done()
    push(answer, 0, [1])
    assert await waiting == [(0, batch([1]))]


async def test_a_choice_that_the_reader_finished() -> None:
    answer = answer_of(1)
    push(answer, 0, [1])
    await answer.receive()
    push(answer, 0, [2], FinishReason.LENGTH)
    answer.stop_early(0)
    assert await answer.receive() == []


async def test_failure() -> None:
    answer = answer_of(1)
    answer.fail(FailRequest(choice_id=ChoiceId(1), cause=Cause.REPLICA_LOST, reason="decode-0 is gone"))
    with pytest.raises(RequestFailedError, match="decode-0 is gone") as caught:
        await answer.receive()
    assert caught.value.code == "replica_lost"
