"""Outputs reach the reader of an answer in order and without loss."""

import asyncio
from pathlib import Path

import pytest

from cluster.spec.sampling import FinishReason, Sampling
from cluster.spec.tiers import CachedTokens
from cluster.tokenizer import Tokenizer
from router.answer import Answer, OpenChoice
from router.api.generation import AnswerReader, choices_of
from router.errors import RequestFailedError
from router.metrics import Metrics
from router.request import Cause, ChoiceId, FailRequest, OutputBatch
from router.text import TextRules
from tests.fakes.dispatching import ask
from tests.fakes.model_folder import write_model_folder


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


@pytest.mark.parametrize("stop", ["", "c"])
async def test_outputs_that_a_slow_client_left_unread_are_written_in_pieces(tmp_path: Path, stop: str) -> None:
    tokenizer = Tokenizer(write_model_folder(tmp_path))
    token_ids = tokenizer.encode("ab" * 300 + "c" + "ab" * 300, add_special_tokens=False)
    request = ask()
    request.text_rules = TextRules(stops=[stop] if stop else [])
    stopped: list[ChoiceId] = []
    answer = Answer([request], stopped.append, lambda _: None)
    push(answer, 0, token_ids, FinishReason.LENGTH)
    pieces = [chunks async for chunks in AnswerReader(tokenizer, answer).chunks()]
    assert max(map(len, pieces)) <= 128 < len(token_ids)
    text = "".join(chunk.text for chunks in pieces for chunk in chunks)
    assert text == ("ab" * 300 if stop else tokenizer.decode(token_ids))
    assert [chunk.finish for chunks in pieces for chunk in chunks if chunk.finish] == ["stop" if stop else "length"]
    assert stopped == []  # replicas have finished the choice already


@pytest.mark.parametrize("stop", ["", "c"])
async def test_further_choices_wait_for_the_prompts_log_probabilities(tmp_path: Path, stop: str) -> None:
    tokenizer = Tokenizer(write_model_folder(tmp_path))
    request = ask(Sampling(num_prompt_logprobs=0))
    request.text_rules = TextRules(stops=[stop] if stop else [])
    stopped: list[ChoiceId] = []
    answer = Answer(choices_of(request, 2), stopped.append, lambda _: None)
    reading = asyncio.create_task(texts_of(AnswerReader(tokenizer, answer)))
    for text, finish in (("bc", None), ("d", FinishReason.LENGTH)):  # its replica was lost, and it started anew
        push(answer, 1, tokenizer.encode(text, add_special_tokens=False), finish)
        await asyncio.sleep(0)
    push(answer, 0, tokenizer.encode("a", add_special_tokens=False), FinishReason.LENGTH)
    assert await reading == [(0, "a"), (1, "b"), (1, "" if stop else "c"), *([] if stop else [(1, "d")])]
    assert stopped == []  # replicas have finished the choice already


def test_cached_tokens_count_once_per_prompt() -> None:
    answer, metrics = Answer(choices_of(ask(), 2), lambda _: None, lambda _: None), Metrics()
    for index in range(2):  # the second choice has started anew, with the whole prompt
        output = batch([1])
        output.cached = CachedTokens(total=2)
        OpenChoice(answer, index, metrics).take(output, 1.0)
    assert metrics.cached_tokens.values == {(): 2}
    assert answer.cached.total == 2


async def texts_of(reader: AnswerReader) -> list[tuple[int, str]]:
    return [(chunk.index, chunk.text) async for chunks in reader.chunks() for chunk in chunks]


async def test_failure() -> None:
    answer = answer_of(1)
    answer.fail(FailRequest(choice_id=ChoiceId(1), cause=Cause.REPLICA_LOST, reason="decode-0 is gone"))
    with pytest.raises(RequestFailedError, match="decode-0 is gone") as caught:
        await answer.receive()
    assert caught.value.code == "replica_lost"
