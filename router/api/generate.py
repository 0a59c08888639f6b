"""Runs the asks of one HTTP request and writes their answer, whole or as it comes."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from cluster.tokenizer import Detokenizer
from router.answer import Answer
from router.api.connection import EventStream, event, unless_client_leaves
from router.api.responses import PromptTokensDetails, Usage
from router.api.shapes import Shape
from router.flight import Ask
from router.service import Service
from router.text import AnswerText, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request, ready to be sent to replicas."""

    asks: Sequence[Ask]
    """One for every choice."""
    stops: Sequence[str]
    shape: Shape
    include_usage: bool
    arrived_s: float


async def respond_whole(service: Service, request: Request, job: Job) -> Response:
    """The answer at once.

    Raises:
        NotReadyError, RequestFailedError, ClientLeftError: there is none.
    """
    with service.relay.open(job.asks, job.arrived_s) as answer:
        texts = _texts(service, job)
        choices = [Piece("", None) for _ in job.asks]
        await unless_client_leaves(request.receive, _collect(answer, texts, choices))
        content = job.shape.whole(choices, _usage(job, texts, answer.stream.num_cached_tokens))
        return Response(content, headers=answer.headers, media_type="application/json")


def respond_stream(service: Service, job: Job) -> Response:
    """The answer as it comes."""
    return EventStream(
        open_answer=lambda: service.relay.open(job.asks, job.arrived_s),
        frames=lambda answer: _frames(answer, _texts(service, job), job),
        comment_s=service.config.router.sse_comment_s,
    )


async def _pieces(answer: Answer, texts: Sequence[AnswerText]) -> AsyncGenerator[list[tuple[int, Piece]], None]:
    """A piece for every token of every choice, those that wait together; a choice's last one says why it ends."""
    while parts := await answer.stream.receive():
        waiting = []
        for part in parts:
            pieces = texts[part.index].push(part.token_ids, part.finish)
            waiting += [(part.index, piece) for piece in pieces]
            if part.finish is None and pieces and pieces[-1].finish is not None:
                answer.enough(part.index)
        yield waiting


async def _collect(answer: Answer, texts: Sequence[AnswerText], choices: list[Piece]) -> None:
    written: list[list[str]] = [[] for _ in choices]
    token_ids: list[list[int]] = [[] for _ in choices]
    async for pieces in _pieces(answer, texts):
        for index, piece in pieces:
            written[index].append(piece.text)
            token_ids[index] += piece.token_ids
            if piece.finish is not None:
                choices[index] = Piece("".join(written[index]), piece.finish, tuple(token_ids[index]))


async def _frames(answer: Answer, texts: Sequence[AnswerText], job: Job) -> AsyncGenerator[bytes, None]:
    """A chunk for every token, also one whose text is not whole yet: clients count and time tokens by chunks.

    The chunks of tokens that wait together are written together.
    """
    opened: set[int] = set()
    async for pieces in _pieces(answer, texts):
        events = []
        for index, piece in pieces:
            if index not in opened:
                opened.add(index)
                events += [event(opening)] if (opening := job.shape.opening(index)) else []
            events.append(event(job.shape.chunk(index, piece)))
        if events:
            yield b"".join(events)
    if job.include_usage:
        yield event(job.shape.closing(_usage(job, texts, answer.stream.num_cached_tokens)))
    yield event(b"[DONE]")


def _texts(service: Service, job: Job) -> list[AnswerText]:
    return [AnswerText(Detokenizer(service.tokenizer), job.stops, ask.stopping.stop_token_ids) for ask in job.asks]


def _usage(job: Job, texts: Sequence[AnswerText], cached_tokens: int) -> Usage:
    prompt_tokens = sum(len(ask.prompt_ids) for ask in job.asks)
    completion_tokens = sum(text.num_tokens for text in texts)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )
