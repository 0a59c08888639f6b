"""Runs the asks of one HTTP request and writes their answer, whole or as it comes."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Self

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cluster.spec.tiers import CachedTokens
from router.access_log import Asked, log_request
from router.answer import Answer
from router.api.connection import EventStream, JsonAnswer, event, unless_client_leaves
from router.api.responses import PromptTokensDetails, Usage
from router.api.shapes import Shape
from router.errors import ClientLeftError
from router.flight import Ask
from router.key_limits import limit_of
from router.key_ring import ApiKey
from router.service import Service
from router.text import AnswerText, Piece, TextRules, join
from router.tracing import TRACEPARENT

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What one HTTP request wants of replicas."""

    caller: ApiKey | None
    """Whose it is; None where no key is needed."""
    asks: Sequence[Ask]
    """One for every choice; those of one prompt stand together."""
    num_choices: int
    """Of each prompt."""
    num_prompt_tokens: int
    """Each prompt counts once, however many choices it has."""
    rules: TextRules
    arrived_s: float
    request_id: str
    traceparent: str = ""
    """The trace that the client has it in, if any."""


class Job(Work, frozen=True, kw_only=True):
    """One HTTP request, ready to be sent to replicas and answered."""

    shape: Shape
    include_usage: bool
    continuous_usage: bool


async def respond_whole(service: Service, request: Request, job: Job) -> Response:
    """The answer at once.

    Raises:
        NotReadyError, QueueFullError, RequestFailedError, ClientLeftError: there is none.
    """
    choices, usage, headers = await unless_client_leaves(request.receive, collect(service, job))
    return JsonAnswer(job.shape.whole(choices, usage), headers=headers)


def respond_stream(service: Service, job: Job) -> Response:
    """The answer as it comes."""
    return EventStream(
        open_answer=lambda: opened(service, job),
        frames=lambda answer: _frames(answer, texts_of(service, job), job),
        config=service.config.router,
    )


@asynccontextmanager
async def opened(service: Service, work: Work) -> AsyncGenerator[Answer, None]:
    """Send the asks to replicas when there is room; what is still open at the end is cancelled.

    Raises:
        NotReadyError, QueueFullError, KeyLimitError: they cannot be sent.
    """
    name, limit = limit_of(service.config.router, work.caller)
    with service.limits.open(name, limit):
        if service.relay.uses_prefixes:
            for keys in dict.fromkeys(ask.page_keys for ask in work.asks):
                if keys is not None:
                    await keys.prepare()
        open_answer = partial(service.relay.open, work.asks, work.arrived_s)
        begun_s = service.relay.now_s()
        with await service.gate.enter(open_answer, min(ask.priority for ask in work.asks)) as answer:
            answer.opened_s = service.relay.now_s()
            answer.queue_s = answer.opened_s - begun_s
            service.metrics.queue_s.note(answer.queue_s)
            span = _begin_span(service, work, answer)
            error: BaseException | None = None
            try:
                yield answer
            except BaseException as raised:
                error = raised
                raise
            finally:
                service.limits.spend(name, limit, work.num_prompt_tokens + answer.stream.num_tokens)
                _tell(service, work, answer, span, error)


def _begin_span(service: Service, work: Work, answer: Answer) -> "Span | None":
    """In the trace of the request, if anything collects traces."""
    if service.tracing is None:
        return None
    span = service.tracing.begin(work.traceparent, work.arrived_s)
    answer.trace = service.tracing.header(span)
    return span


def _tell(service: Service, work: Work, answer: Answer, span: "Span | None", error: BaseException | None) -> None:
    """A request has ended: tell those who look at requests, and what collects traces."""
    has_left = isinstance(error, asyncio.CancelledError | ClientLeftError)
    outcome = "finished" if error is None else "left" if has_left else "failed"
    service.recent.add(answer, work.arrived_s, work.num_prompt_tokens, outcome)
    if service.config.log.requests:
        log_request(_asked(work, answer), answer, outcome, error, service.relay.now_s())
    if service.tracing is not None and span is not None:
        facts = {
            "gen_ai.request.model": service.model,
            "gen_ai.usage.input_tokens": work.num_prompt_tokens,
            "gen_ai.usage.output_tokens": answer.stream.num_tokens,
        }
        service.tracing.end(span, answer, facts, error)


def _asked(work: Work, answer: Answer) -> Asked:
    return Asked(
        request_id=work.request_id,
        caller=work.caller.name if work.caller is not None else None,
        traceparent=answer.trace.get(TRACEPARENT, work.traceparent),
        num_prompt_tokens=work.num_prompt_tokens,
        arrived_s=work.arrived_s,
    )


async def collect(service: Service, work: Work) -> tuple[list[Piece], Usage, dict[str, str]]:
    """Every choice whole, what they used, and the headers of the response."""
    async with opened(service, work) as answer:
        parts: list[list[Piece]] = [[] for _ in work.asks]
        async for pieces in Pieces(answer, texts_of(service, work)):
            for index, piece in pieces:
                parts[index].append(piece)
        choices = [join(part) for part in parts]
        num_tokens = sum(len(choice.token_ids) for choice in choices)
        return choices, usage_of(work, answer, num_tokens), answer.headers


class Pieces:
    """A piece for every token of every choice, those that wait together; a choice's last one says why it ends."""

    def __init__(self, answer: Answer, texts: Sequence[AnswerText]) -> None:
        self._answer = answer
        self._texts = texts

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[tuple[int, Piece]]:
        if not (parts := await self._answer.stream.receive()):
            raise StopAsyncIteration
        waiting = []
        for part in parts:
            pieces = self._texts[part.index].push(part.token_ids, part.finish, part.logprobs)
            if part.prompt_logprobs and pieces:
                pieces[0] = msgspec.structs.replace(pieces[0], prompt_logprobs=tuple(part.prompt_logprobs))
            waiting += [(part.index, piece) for piece in pieces]
            if part.finish is None and pieces and pieces[-1].finish is not None:
                self._answer.enough(part.index)
        return waiting


async def _frames(answer: Answer, texts: Sequence[AnswerText], job: Job) -> AsyncGenerator[bytes, None]:
    """A chunk for every token, also one whose text is not whole yet: clients count and time tokens by chunks.

    The chunks of tokens that wait together are written together.
    """
    opened: set[int] = set()
    num_tokens = 0
    async for pieces in Pieces(answer, texts):
        events = []
        for index, piece in pieces:
            if index not in opened:
                opened.add(index)
                events += [event(opening)] if (opening := job.shape.opening(index, piece)) else []
            num_tokens += len(piece.token_ids)
            usage = usage_of(job, answer, num_tokens) if job.continuous_usage else None
            events.append(event(job.shape.chunk(index, piece, usage)))
        if events:
            yield b"".join(events)
    if job.include_usage:
        yield event(job.shape.closing(usage_of(job, answer, num_tokens)))
    yield event(b"[DONE]")


def texts_of(service: Service, work: Work) -> list[AnswerText]:
    """For every choice what makes text of its tokens."""
    return [AnswerText(service.tokenizer, work.rules) for _ in work.asks]


def usage_of(work: Work, answer: Answer, completion_tokens: int) -> Usage:
    """Of a whole answer, or of a stream so far."""
    prompt_tokens = work.num_prompt_tokens
    cached = sum(answer.stream.cached[:: work.num_choices], CachedTokens())
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=cached.total, host_tokens=cached.host, storage_tokens=cached.storage
        ),
    )
