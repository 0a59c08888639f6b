"""Writes one answer of ``/v1/responses``: the object, and the events of its stream."""

import itertools
import time
from typing import Any, Literal

import msgspec

from cluster.spec.sampling import FinishReason
from router.api.logprobs import chat_logprobs
from router.api.response_objects import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from router.api.response_request import ResponseRequest
from router.api.responses import ChosenLogprob, Usage
from router.service import Service
from router.text import Piece

_encoder = msgspec.json.Encoder()


class ResponseWriter:
    """One response; events are numbered in the order of the calls."""

    def __init__(self, request_id: str, service: Service, body: ResponseRequest) -> None:
        self._tokenizer = service.tokenizer
        self._numbers = itertools.count()
        self._item_id = f"msg_{request_id}"
        self._begun = ResponseObject(
            id=f"resp_{request_id}",
            created_at=int(time.time()),
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=service.model,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            user=body.user,
        )

    def whole(self, answer: Piece, usage: Usage) -> bytes:
        """The response at its end."""
        return _encoder.encode(self._ended(answer, usage))

    def opening(self) -> bytes:
        """The events before any text."""
        message = OutputMessage(id=self._item_id, status="in_progress", content=[])
        return b"".join(
            [
                self._event("response.created", response=self._begun),
                self._event("response.in_progress", response=self._begun),
                self._event("response.output_item.added", output_index=0, item=message),
                self._part_event("response.content_part.added", part=OutputText(text="")),
            ]
        )

    def delta(self, piece: Piece) -> bytes:
        """The next text."""
        logprobs = self._logprobs(piece)
        return self._part_event("response.output_text.delta", delta=piece.text, logprobs=logprobs)

    def closing(self, answer: Piece, usage: Usage) -> bytes:
        """The events after all text."""
        ended = self._ended(answer, usage)
        (message,) = ended.output
        (part,) = message.content
        return b"".join(
            [
                self._part_event("response.output_text.done", text=part.text, logprobs=part.logprobs),
                self._part_event("response.content_part.done", part=part),
                self._event("response.output_item.done", output_index=0, item=message),
                self._event(f"response.{ended.status}", response=ended),
            ]
        )

    def failed(self, code: str, message: str) -> bytes:
        """The event that there will be no more."""
        error = ResponseError(code=code, message=message)
        failed = msgspec.structs.replace(self._begun, status="failed", error=error)
        return self._event("response.failed", response=failed)

    def _ended(self, answer: Piece, usage: Usage) -> ResponseObject:
        status: Literal["completed", "incomplete"]
        status = "incomplete" if answer.finish is FinishReason.LENGTH else "completed"
        part = OutputText(text=answer.text, logprobs=self._logprobs(answer))
        return msgspec.structs.replace(
            self._begun,
            status=status,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            output=[OutputMessage(id=self._item_id, status=status, content=[part])],
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
                output_tokens=usage.completion_tokens,
                total_tokens=usage.total_tokens,
            ),
        )

    def _logprobs(self, piece: Piece) -> list[ChosenLogprob]:
        told = chat_logprobs(self._tokenizer, piece)
        return told.content if told else []

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encoder.encode(data))
