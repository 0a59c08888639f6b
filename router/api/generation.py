"""``/v1/completions``, ``/v1/chat/completions`` and ``/v1/responses``: requests run and answers written."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cluster.spec.tiers import CachedTokens
from router.admission import ApiKey
from router.answer import Answer
from router.api.body import read
from router.api.chat import chat_request, markers
from router.api.document import document
from router.api.front import caller_of, dp_rank_of, header, priority_of, request_id, session_of
from router.api.intake import choices_of, completion_requests, text_rules
from router.api.logprobs import ShownPrompt
from router.api.requests import ChatRequest, CompletionRequest, GenerationBody
from router.api.response_request import ResponseRequest, chat_of, in_own_words
from router.api.response_writer import ResponseObject, ResponseWriter
from router.api.responses import ChatChunk, ChatCompletion, Completion, PromptTokensDetails, Usage
from router.api.writers import ChatWriter, CompletionWriter, Writer
from router.connection import EventStream, JsonAnswer, unless_client_leaves
from router.errors import ApiError, ClientLeftError
from router.records import TRACEPARENT, FinishedRequest
from router.request import GenerateRequest
from router.service import Service
from router.text import AnswerText, OutputChunk, TextRules

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request, ready to be sent to replicas."""

    caller: ApiKey | None
    """Owner of its key; None where no key is needed."""
    requests: Sequence[GenerateRequest]
    """One for every choice; those of one prompt stand together."""
    num_choices: int
    num_prompt_tokens: int
    """Each prompt counts once, however many choices it has."""
    rules: TextRules
    arrived_s: float
    request_id: str
    traceparent: str
    """The client's OpenTelemetry trace; empty for none."""


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["generation"])

    @router.post("/v1/completions", openapi_extra=document(CompletionRequest, Completion))
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        arrived_s = service.relay.now_s()
        body = await read(request, CompletionRequest)
        requests = await completion_requests(service, body)
        writer = CompletionWriter(request_id(request), service, body, _prompts(service, body, requests))
        return await _respond(service, request, body, _make_job(service, request, body, requests, arrived_s), writer)

    @router.post("/v1/chat/completions", openapi_extra=document(ChatRequest, ChatCompletion, ChatChunk))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        arrived_s = service.relay.now_s()
        body = await read(request, ChatRequest)
        made, new_reader = await chat_request(service, body)
        writer = ChatWriter(request_id(request), service, body, new_reader, made.prompt_ids)
        job = _make_job(service, request, body, [made], arrived_s, markers(service, body))
        return await _respond(service, request, body, job, writer)

    @router.post("/v1/responses", openapi_extra=document(ResponseRequest, ResponseObject))
    async def create_response(request: Request) -> Response:
        """Answer a text or a conversation, in the form of OpenAI's newer API; nothing is stored."""
        arrived_s = service.relay.now_s()
        body = await read(request, ResponseRequest)
        chat = chat_of(body)
        try:
            made, new_reader = await chat_request(service, chat)
            texts = markers(service, chat)
        except ApiError as error:
            raise in_own_words(error) from None
        writer = ResponseWriter(request_id(request), service, body, new_reader())
        fields = {"user": body.user} | body.others
        job = _make_job(service, request, chat, [made], arrived_s, texts, fields)
        return await _respond(service, request, chat, job, writer)

    return router


def _make_job(
    service: Service,
    request: Request,
    body: GenerationBody,
    requests: Sequence[GenerateRequest],
    arrived_s: float,
    markers: Sequence[str] = (),
    session_fields: Mapping[str, Any] | None = None,
) -> Job:
    """Combine prompts, body and headers; every choice of every prompt becomes a request of its own."""
    session = session_of(request, body.others if session_fields is None else session_fields)
    priority, dp_rank = priority_of(request, body.priority), dp_rank_of(request, service.config, body)
    ours = [msgspec.structs.replace(one, session_id=session, priority=priority, dp_rank=dp_rank) for one in requests]
    return Job(
        caller=caller_of(request),
        requests=[choice for one in ours for choice in choices_of(one, body.num_choices)],
        num_choices=body.num_choices,
        num_prompt_tokens=sum(len(one.prompt_ids) for one in requests),
        rules=text_rules(service, body, markers),
        arrived_s=arrived_s,
        request_id=request_id(request),
        traceparent=header(request.scope, TRACEPARENT.encode()) or "",
    )


async def _respond(service: Service, request: Request, body: GenerationBody, job: Job, writer: Writer) -> Response:
    """Return the answer, whole or as a stream; errors of a stream come when it is written."""
    if body.stream:
        return EventStream(
            open_answer=lambda: opened(service, job),
            frames=lambda answer: _frames(service, answer, job, body, writer),
            failed=writer.failed,
        )
    return await unless_client_leaves(request.receive, _whole(service, job, writer))


@asynccontextmanager
async def opened(service: Service, job: Job) -> AsyncGenerator[Answer, None]:
    """Send the requests to replicas when there is room; cancel what is still open at the end.

    Raises:
        NotReadyError, QueueFullError, KeyLimitError: they cannot be sent.
    """
    with service.limits.open(job.caller) as account:
        if service.relay.uses_prefixes:
            for keys in dict.fromkeys(request.page_keys for request in job.requests):
                if keys is not None:
                    await keys.prepare()
        open_answer = partial(service.relay.open, job.requests, job.arrived_s)
        begun_s = service.relay.now_s()
        with await service.gate.enter(open_answer, min(request.priority for request in job.requests)) as answer:
            answer.opened_s = service.relay.now_s()
            answer.queue_s = answer.opened_s - begun_s
            service.metrics.queue_s.observe(answer.queue_s)
            span = None
            if service.tracing is not None:
                span = service.tracing.begin(job.traceparent, job.arrived_s)
                answer.trace_header = service.tracing.header(span)
            error: BaseException | None = None
            try:
                yield answer
            except BaseException as raised:
                error = raised
                raise
            finally:
                account.use(job.num_prompt_tokens + answer.num_tokens)
                _record(service, job, answer, span, error)


def _record(service: Service, job: Job, answer: Answer, span: "Span | None", error: BaseException | None) -> None:
    """Record a request that has ended: on the status page, in the access log, and as a span."""
    has_left = isinstance(error, asyncio.CancelledError | ClientLeftError)
    finished = FinishedRequest(
        answer=answer,
        outcome="finished" if error is None else "left" if has_left else "failed",
        error=error,
        request_id=job.request_id,
        caller=job.caller.name if job.caller is not None else None,
        traceparent=answer.trace_header.get(TRACEPARENT, job.traceparent),
        num_prompt_tokens=job.num_prompt_tokens,
        arrived_s=job.arrived_s,
        ended_s=service.relay.now_s(),
        unix_s=time.time(),
    )
    service.recent.appendleft(finished)
    if service.config.log.requests:
        finished.log()
    if service.tracing is not None and span is not None:
        facts = {
            "gen_ai.request.model": service.model.name,
            "gen_ai.usage.input_tokens": job.num_prompt_tokens,
            "gen_ai.usage.output_tokens": answer.num_tokens,
        }
        service.tracing.end(span, answer, facts, error)


class Chunks:
    """Async iterator over a chunk for every token of every choice, those that wait together in one list.

    A choice's last chunk has its finish. Not a generator, which would have to be closed.
    """

    def __init__(self, service: Service, job: Job, answer: Answer) -> None:
        self._answer = answer
        self._texts = [AnswerText(service.tokenizer, job.rules, index) for index in range(len(job.requests))]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[OutputChunk]:
        if not (batches := await self._answer.receive()):
            raise StopAsyncIteration
        waiting: list[OutputChunk] = []
        for index, batch in batches:
            chunks = self._texts[index].push(batch.token_ids, batch.finish, batch.logprobs)
            if batch.prompt_logprobs and chunks:
                chunks[0].prompt_logprobs = batch.prompt_logprobs
            waiting += chunks
            if batch.finish is None and chunks and chunks[-1].finish is not None:
                self._answer.enough(index)
        return waiting


async def _whole(service: Service, job: Job, writer: Writer) -> Response:
    async with opened(service, job) as answer:
        parts: list[list[OutputChunk]] = [[] for _ in job.requests]
        async for chunks in Chunks(service, job, answer):
            for chunk in chunks:
                parts[chunk.index].append(chunk)
        usage = _usage(job, answer, sum(len(chunk.token_ids) for part in parts for chunk in part))
        headers = answer.headers
    return JsonAnswer(writer.whole(parts, usage), headers=headers)


async def _frames(
    service: Service, answer: Answer, job: Job, body: GenerationBody, writer: Writer
) -> AsyncGenerator[bytes, None]:
    """Yield an event for every token, even without complete text: clients count and time tokens by events.

    The events of tokens that wait together are written together.
    """
    begun: set[int] = set()
    num_tokens, with_usage = 0, body.continuous_usage
    async for chunks in Chunks(service, job, answer):
        events = []
        for chunk in chunks:
            if chunk.index not in begun:
                begun.add(chunk.index)
                events.append(writer.opening(chunk))
            num_tokens += len(chunk.token_ids)
            usage = _usage(job, answer, num_tokens) if with_usage else None
            events.append(writer.chunk(chunk, usage))
        if events:
            yield b"".join(events)
    yield writer.closing(_usage(job, answer, num_tokens))


def _usage(job: Job, answer: Answer, completion_tokens: int) -> Usage:
    """Return the usage of a whole answer, or of a stream so far."""
    prompt_tokens = job.num_prompt_tokens
    cached = sum(answer.cached[:: job.num_choices], CachedTokens())
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=cached.total, host_tokens=cached.host, storage_tokens=cached.storage
        ),
    )


def _prompts(service: Service, body: CompletionRequest, requests: Sequence[GenerateRequest]) -> list[ShownPrompt]:
    if not body.echo:
        return [ShownPrompt(request.prompt_ids) for request in requests]
    skip = body.skip_special_tokens is not False
    match body.prompt:
        case str():
            texts = [body.prompt]
        case [str(), *_]:
            texts = cast(list[str], body.prompt)
        case _:
            texts = [service.tokenizer.decode([*request.prompt_ids], skip) for request in requests]
    return [ShownPrompt(one.prompt_ids, text, skip) for one, text in zip(requests, texts, strict=True)]
