"""JSON shape of ``/v1/responses``: the object, and the events of its stream."""

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from cluster.spec.sampling import FinishReason
from router.api.intake import given_or
from router.api.logprobs import chat_logprobs
from router.api.response_items import Event, OutputItems
from router.api.response_objects import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from router.api.response_request import SEALED_THOUGHTS, Reasoning, ResponseRequest
from router.api.responses import Usage
from router.errors import RequestFailedError
from router.message import MessageReader
from router.request import OutputChunk
from router.service import Service

_encoder = msgspec.json.Encoder()


class ResponseShape:
    """See ``router.api.shapes.Shape``; events are numbered in the order of calls."""

    def __init__(self, request_id: str, service: Service, body: ResponseRequest, reader: MessageReader) -> None:
        self._tokenizer = service.tokenizer
        self._reader = reader
        self._numbers = itertools.count()
        self._items = OutputItems(request_id, seals_thoughts=SEALED_THOUGHTS in (body.include or ()))
        self._finish: FinishReason | None = None
        self._num_thought_tokens = 0
        self._num_tokens = 0
        self._begun = _begun(request_id, service, body)

    def opening(self, first: OutputChunk) -> bytes:
        """Return the events that the response was created; the first chunk brings none of its own."""
        del first
        kinds = ("response.created", "response.in_progress")
        return self._write([(kind, {"response": self._begun}) for kind in kinds])

    def chunk(self, chunk: OutputChunk, usage: Usage | None) -> bytes:
        del usage  # it comes with the last event
        return self._write(self._take(chunk))

    def _take(self, chunk: OutputChunk) -> list[Event]:
        """Take the next token; return its events."""
        read = self._reader.read(chunk.text, is_end=chunk.finish is not None)
        logprobs = chat_logprobs(self._tokenizer, chunk).content if chunk.logprobs else ()
        events = self._items.push(read, logprobs)
        self._finish = chunk.finish
        self._num_tokens += len(chunk.token_ids)
        if self._items.is_thinking:
            self._num_thought_tokens = self._num_tokens
        return events

    def closing(self, usage: Usage) -> bytes:
        ended, events = self._ended(usage)
        return self._write([*events, (f"response.{ended.status}", {"response": ended})])

    def whole(self, choices: Sequence[Sequence[OutputChunk]], usage: Usage) -> bytes:
        for chunk in choices[0]:
            self._take(chunk)
        return _encoder.encode(self._ended(usage)[0])

    def failed(self, error: RequestFailedError) -> bytes:
        why = ResponseError(code=error.code, message=str(error))
        failed = msgspec.structs.replace(self._begun, status="failed", error=why)
        return self._write([("response.failed", {"response": failed})])

    def _ended(self, usage: Usage) -> tuple[ResponseObject, list[Event]]:
        status: Literal["completed", "incomplete"]
        status = "incomplete" if self._finish is FinishReason.LENGTH else "completed"
        items, events = self._items.end(status)
        cached = usage.prompt_tokens_details
        ended = msgspec.structs.replace(
            self._begun,
            status=status,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            output=items,
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputTokensDetails(**msgspec.structs.asdict(cached), cache_write_tokens=0),
                output_tokens=usage.completion_tokens,
                output_tokens_details=OutputTokensDetails(reasoning_tokens=self._num_thought_tokens),
                total_tokens=usage.total_tokens,
            ),
        )
        return ended, events

    def _write(self, events: Iterable[Event]) -> bytes:
        return b"".join(self._event(kind, fields) for kind, fields in events)

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encoder.encode(data))


def _begun(request_id: str, service: Service, body: ResponseRequest) -> ResponseObject:
    """Return the response before its first token, with the request's fields."""
    written = body.text.format if body.text is not None else None
    return ResponseObject(
        id=f"resp_{request_id}",
        created_at=int(time.time()),
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=service.model.name,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=(body.reasoning or Reasoning()).model_dump(),
        temperature=given_or(body.temperature, service.model.sampling_defaults.temperature),
        text={"format": {"type": "text"} if written is None else written.model_dump(by_alias=True, exclude_unset=True)},
        tool_choice=body.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
        tools=[tool.model_dump() for tool in body.tools or ()],
        top_p=given_or(body.top_p, service.model.sampling_defaults.top_p),
        user=body.user,
    )
