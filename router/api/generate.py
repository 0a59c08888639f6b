"""Runs the asks of one HTTP request and writes their answer, whole or as it comes."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from router.answer import Answer
from router.api.connection import EventStream, event, unless_client_leaves
from router.api.responses import PromptTokensDetails, Usage
from router.api.shapes import Shape
from router.flight import Ask
from router.service import Service
from router.text import AnswerText, Piece, TextRules, join


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request, ready to be sent to replicas."""

    asks: Sequence[Ask]
    """One for every choice; those of one prompt stand together."""
    num_choices: int
    """Of each prompt."""
    rules: TextRules
    shape: Shape
    include_usage: bool
    continuous_usage: bool
    arrived_s: float


async def respond_whole(service: Service, request: Request, job: Job) -> Response:
    """The answer at once.

    Raises:
        NotReadyError, RequestFailedError, ClientLeftError: there is none.
    """
    with service.relay.open(job.asks, job.arrived_s) as answer:
        parts = await unless_client_leaves(request.receive, _collect(answer, _texts(service, job)))
        choices = [join(pieces) for pieces in parts]
        num_tokens = sum(len(choice.token_ids) for choice in choices)
        content = job.shape.whole(choices, _usage(job, answer, num_tokens))
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
            pieces = texts[part.index].push(part.token_ids, part.finish, part.logprobs)
            waiting += [(part.index, piece) for piece in pieces]
            if part.finish is None and pieces and pieces[-1].finish is not None:
                answer.enough(part.index)
        yield waiting


async def _collect(answer: Answer, texts: Sequence[AnswerText]) -> list[list[Piece]]:
    """The pieces of every choice."""
    collected: list[list[Piece]] = [[] for _ in texts]
    async for pieces in _pieces(answer, texts):
        for index, piece in pieces:
            collected[index].append(piece)
    return collected


async def _frames(answer: Answer, texts: Sequence[AnswerText], job: Job) -> AsyncGenerator[bytes, None]:
    """A chunk for every token, also one whose text is not whole yet: clients count and time tokens by chunks.

    The chunks of tokens that wait together are written together.
    """
    opened: set[int] = set()
    num_tokens = 0
    async for pieces in _pieces(answer, texts):
        events = []
        for index, piece in pieces:
            if index not in opened:
                opened.add(index)
                events += [event(opening)] if (opening := job.shape.opening(index)) else []
            num_tokens += len(piece.token_ids)
            usage = _usage(job, answer, num_tokens) if job.continuous_usage else None
            events.append(event(job.shape.chunk(index, piece, usage)))
        if events:
            yield b"".join(events)
    if job.include_usage:
        yield event(job.shape.closing(_usage(job, answer, num_tokens)))
    yield event(b"[DONE]")


def _texts(service: Service, job: Job) -> list[AnswerText]:
    return [AnswerText(service.tokenizer, job.rules) for _ in job.asks]


def _usage(job: Job, answer: Answer, completion_tokens: int) -> Usage:
    """A prompt counts once, however many choices it has."""
    prompt_tokens = sum(len(ask.prompt_ids) for ask in job.asks[:: job.num_choices])
    cached_tokens = sum(answer.stream.cached_tokens[:: job.num_choices])
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )
