"""Handlers of ``/v1/completions``, ``/v1/chat/completions`` and ``/v1/responses``, from the body to the answer."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from fastapi import APIRouter
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from cluster.tokenizer import Tokenizer
from router.answer import Answer
from router.api.completions import ChatChunk, ChatCompletion, Completion, PromptTokensDetails, Usage
from router.api.document import document
from router.api.front import Arrival, arrival_of, dp_rank_of, preprocess, priority_of, session_of
from router.api.response_writer import ResponseObject, ResponseWriter
from router.api.writers import ChatWriter, CompletionWriter, Writer
from router.connection import EventStream, JsonAnswer, unless_client_leaves
from router.errors import ClientLeftError, bad_request
from router.page_index import PromptKeys
from router.preprocess.intake import SEED_MASK
from router.preprocess.job import ChatOptions, CompletionOptions, Preprocessed, ResponseOptions, Route
from router.preprocess.requests import ChatRequest, CompletionRequest
from router.preprocess.response_request import ResponseRequest
from router.records import TRACEPARENT, log_request
from router.request import GenerateRequest, OutputBatch
from router.service import Service
from router.text import AnswerText, OutputChunk

if TYPE_CHECKING:
    from opentelemetry.trace import Span

MAX_LOGPROBS = 1 << 20
"""Maximum number of log-probabilities of a response that is not streamed, which take 60 bytes each."""
_MOST_AT_ONCE = 128
"""Number of tokens that are written without a break, in a few milliseconds."""


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["generation"])

    @router.post(Route.COMPLETIONS, openapi_extra=document(CompletionRequest, Completion))
    async def completions(http: Request) -> Response:
        """Continue one or more prompts."""
        return await _respond(service, http, Route.COMPLETIONS)

    @router.post(Route.CHAT, openapi_extra=document(ChatRequest, ChatCompletion, ChatChunk))
    async def chat_completions(http: Request) -> Response:
        """Answer a conversation."""
        return await _respond(service, http, Route.CHAT)

    @router.post(Route.RESPONSES, openapi_extra=document(ResponseRequest, ResponseObject))
    async def create_response(http: Request) -> Response:
        """Answer a text or a conversation with OpenAI's Responses API. Nothing is stored."""
        return await _respond(service, http, Route.RESPONSES)

    return router


async def _respond(service: Service, http: Request, route: Route) -> Response:
    """Return the answer as JSON, or as a stream whose errors are raised while it is written."""
    asked = await preprocess(service, http, route)
    assert isinstance(asked, Preprocessed)
    arrival = arrival_of(http)
    for number, request in enumerate(asked.requests):
        _complete(service, arrival, asked, request, asked.page_keys[number] if asked.page_keys else ())
    choices = [choice for request in asked.requests for choice in choices_of(request, asked.num_choices)]
    writer = _writer(service, arrival, asked)
    opening = _open_answer(service, arrival, choices)
    if asked.stream:
        frames = partial(_frames, service.model.tokenizer, asked.options.continuous_usage, writer)
        return EventStream(opening, frames, writer.failed)
    return await unless_client_leaves(http.scope, _whole(service.model.tokenizer, opening, writer))


def _complete(
    service: Service, arrival: Arrival, asked: Preprocessed, request: GenerateRequest, keys: Sequence[bytes]
) -> None:
    """Add to a request the facts in the headers, and the ``keys`` of its first pages."""
    request.session_id, request.arrived_s = session_of(arrival, asked.session_id), arrival.arrived_s
    request.request_id = arrival.request_id
    request.priority = priority_of(arrival, asked.priority)
    request.tenant, request.weight = arrival.tenant, arrival.weight
    request.dp_rank = dp_rank_of(arrival, service.config, asked.dp_rank)
    if request.may_use_cache:
        request.page_keys = PromptKeys(request.prompt_ids, service.model.page_size, request.cache_salt, keys)


def choices_of(request: GenerateRequest, num_choices: int) -> list[GenerateRequest]:
    """Return a request for each choice of a prompt, with its own seed. Only the first has prompt log-probabilities."""
    seeds = [(request.sampling.seed + choice) & SEED_MASK for choice in range(1, num_choices)]
    samplings = [replace(request.sampling, seed=seed, num_prompt_logprobs=None) for seed in seeds]
    others = [replace(request, sampling=sampling, shares_prompt=True, output_ids=[]) for sampling in samplings]
    return [request, *others]


def _writer(service: Service, arrival: Arrival, asked: Preprocessed) -> Writer:
    request_id = arrival.request_id
    match asked.options:
        case CompletionOptions() as options:
            prompts = [request.prompt_ids for request in asked.requests]
            return CompletionWriter(request_id, service.model, options, prompts, asked.num_choices)
        case ChatOptions() as options:
            return ChatWriter(request_id, service.model, options, asked.requests[0].prompt_ids, asked.num_choices)
        case ResponseOptions() as options:
            return ResponseWriter(request_id, service.model, options)


@asynccontextmanager
async def _open_answer(
    service: Service, arrival: Arrival, requests: Sequence[GenerateRequest]
) -> AsyncGenerator[Answer, None]:
    """Send the requests to replicas when there is capacity; on exit, cancel unfinished ones and record the outcome.

    Raises:
        NotReadyError, QueueFullError, KeyLimitError: the requests cannot be sent.
    """
    with (
        service.limits.open(arrival.caller, len(requests)) as account,
        service.overview.show(requests) as shown,
    ):
        begun_s = service.relay.now_s()
        cost = sum(request.decode_len for request in requests)
        send, priority = partial(service.relay.open, requests), requests[0].priority
        with await service.gate.enter(send, priority, arrival.tenant, arrival.weight, cost) as answer:
            shown.answer = answer
            answer.queue_s = answer.opened_s - begun_s
            service.metrics.preprocess_s.observe(begun_s - answer.arrived_s)
            service.metrics.queue_s.observe(answer.queue_s)
            span = None
            if service.tracing is not None:
                span = service.tracing.begin(_traceparent(arrival), answer.arrived_s)
                answer.trace_header = service.tracing.header(span)
            error: BaseException | None = None
            try:
                yield answer
            except BaseException as raised:
                error = raised
                raise
            finally:
                account.use(answer.num_prompt_tokens + answer.num_tokens)
                _record(service, arrival, answer, span, error)


def _record(
    service: Service, arrival: Arrival, answer: Answer, span: "Span | None", error: BaseException | None
) -> None:
    """Record a finished request on the status page, in the access log, and as a span."""
    has_left = isinstance(error, asyncio.CancelledError | ClientLeftError)
    outcome = "finished" if error is None else "left" if has_left else "failed"
    summary = answer.summary(outcome, service.relay.now_s())
    service.overview.recent.appendleft(summary)
    if service.config.log.requests:
        log_request(
            answer,
            summary,
            caller=arrival.caller.name if arrival.caller is not None else None,
            traceparent=answer.trace_header.get(TRACEPARENT, _traceparent(arrival)),
            error=error,
        )
    if service.tracing is not None and span is not None:
        service.tracing.end(span, answer, service.model.name, error)


def _traceparent(arrival: Arrival) -> str:
    return arrival.header(TRACEPARENT.encode()) or ""


class AnswerReader:
    """Reader of an answer's choices as text. It stops a choice at a stop string."""

    def __init__(self, tokenizer: Tokenizer, answer: Answer) -> None:
        self._answer = answer
        self._texts = [
            AnswerText(tokenizer, request.text_rules, index, request.prompt_ids)
            for index, request in enumerate(answer.requests)
        ]
        self._first_of: list[int] = []
        """Index of the first choice of each choice's prompt."""
        for index, request in enumerate(answer.requests):
            self._first_of.append(self._first_of[-1] if request.shares_prompt else index)
        self._held: dict[int, dict[int, OutputBatch]] = {
            first: {}
            for first, request in enumerate(answer.requests)
            if request.sampling.num_prompt_logprobs is not None
        }
        """Output of further choices, by first choice, held back until that one has the prompt's log-probabilities.

        Usually the first choice has output before the others, but not after a loss of its replica.
        """

    async def chunks(self) -> AsyncGenerator[list[OutputChunk], None]:
        """Yield one chunk for each token until every choice has finished, with breaks for other clients."""
        while batches := await self._answer.receive():
            chunks: list[OutputChunk] = []
            for index, batch in self._in_order(batches):
                for part in batch.parts(_MOST_AT_ONCE):
                    chunks += self._push(index, part, is_finished=batch.finish is not None)
                    if len(chunks) >= _MOST_AT_ONCE:
                        yield chunks
                        chunks = []
                        await asyncio.sleep(0)
            if chunks:
                yield chunks

    def _in_order(self, batches: Sequence[tuple[int, OutputBatch]]) -> Iterator[tuple[int, OutputBatch]]:
        """Yield batches, and those that were held back for them."""
        for index, batch in batches:
            held = self._held.get(first := self._first_of[index])
            if held is None or index == first:
                yield index, batch
                yield from self._held.pop(index, {}).items()
            elif index in held:
                held[index].append(batch)
            else:
                held[index] = batch

    def _push(self, index: int, batch: OutputBatch, *, is_finished: bool) -> list[OutputChunk]:
        """Return a choice's next chunks; ``is_finished`` if replicas have finished the choice."""
        text = self._texts[index]
        if text.is_stopped:
            return []
        chunks = text.push(batch.token_ids, batch.finish, batch.logprobs)
        if batch.prompt_logprobs and chunks:
            chunks[0].prompt_logprobs = batch.prompt_logprobs
        if text.is_stopped and not is_finished:
            self._answer.stop_early(index)
        return chunks


async def _whole(tokenizer: Tokenizer, opening: AbstractAsyncContextManager[Answer], writer: Writer) -> Response:
    num_tokens = num_logprobs = 0
    async with opening as answer:
        reader = AnswerReader(tokenizer, answer)
        async for chunks in reader.chunks():
            for chunk in chunks:
                if chunk.logprobs:
                    num_logprobs += sum(1 + len(given.top_ids) for given in chunk.logprobs)
                    _check_logprobs(num_logprobs)
                await writer.prepare(chunk)
                writer.gather(chunk)
                num_tokens += len(chunk.token_ids)
        usage = _usage(answer, num_tokens)
        headers = answer.headers
    return JsonAnswer(writer.whole(usage), headers=headers)


def _check_logprobs(number: int) -> None:
    if number > MAX_LOGPROBS:
        most = f"at most {MAX_LOGPROBS} in one response; ask for fewer, or for stream=true"
        raise bad_request(f"logprobs: the answer has more log-probabilities; allowed: {most}", "logprobs")


async def _frames(
    tokenizer: Tokenizer, with_usage: bool, writer: Writer, answer: Answer
) -> AsyncGenerator[bytes, None]:
    """Yield events for every token, even one without text, because clients count and time tokens by events.

    Tokens that arrive together are written together.
    """
    reader, num_tokens = AnswerReader(tokenizer, answer), 0
    async for chunks in reader.chunks():
        events = []
        for chunk in chunks:
            await writer.prepare(chunk)
            num_tokens += len(chunk.token_ids)
            usage = _usage(answer, num_tokens) if with_usage else None
            events.append(writer.chunk(chunk, usage))
        yield b"".join(events)
    yield writer.closing(_usage(answer, num_tokens))


def _usage(answer: Answer, completion_tokens: int) -> Usage:
    prompt_tokens, cached = answer.num_prompt_tokens, answer.cached
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=cached.total, host_tokens=cached.host, storage_tokens=cached.storage
        ),
    )
