"""Writer of ``/v1/responses``: the object, its items (reasoning, messages, calls), and the events of its stream."""

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from cluster.spec.sampling import FinishReason
from router.api.completions import PromptTokensDetails, Usage, chat_logprobs
from router.api.writers import new_reader
from router.errors import RequestFailedError
from router.message import MessageEvent, ReasoningEvent, new_call_id
from router.preprocess.job import ResponseOptions
from router.preprocess.model import ServedModel
from router.preprocess.response_request import sealed
from router.text import OutputChunk
from router.tool_calls.events import Argued, CallBegun, Said

_encode_json = msgspec.json.Encoder().encode

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[msgspec.Raw] = []


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputReasoning(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: str | None = None


class OutputCall(msgspec.Struct, frozen=True, kw_only=True, tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputTokensDetails(PromptTokensDetails, frozen=True, kw_only=True, omit_defaults=True):
    cache_write_tokens: int
    """Tokens written to the cache, which OpenAI bills; always 0 here."""


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    code: str | None
    message: str


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


Event = tuple[str, dict[str, Any]]
"""Type and fields of a server-sent event."""


class OutputItems:
    """Output items so far. Only the last one grows; an event of another item ends it."""

    def __init__(self, request_id: str, *, encrypts_reasoning: bool = False) -> None:
        """Start empty; ``encrypts_reasoning`` adds ``encrypted_content``, the only form in which some clients keep
        reasoning."""
        self._request_id = request_id
        self._encrypts_reasoning = encrypts_reasoning
        self._ended: list[OutputItem] = []
        self._growing: _Growing | None = None
        self._pending: list[msgspec.Raw] = []
        """Log-probabilities of tokens that have not produced text yet."""

    @property
    def is_thinking(self) -> bool:
        return isinstance(self._growing, _Reasoning)

    def push(self, read: Sequence[MessageEvent], logprobs: Sequence[msgspec.Raw] = ()) -> list[Event]:
        self._pending += logprobs
        events: list[Event] = []
        for event in read:
            match event:
                case ReasoningEvent(text):
                    events += self._grow(_Reasoning, text)
                case Said(text):
                    events += self._grow(_Message, text)
                case CallBegun(name, call_id):
                    events += self._end("completed")
                    events += self._begin(_Call(self._request_id, len(self._ended), name, call_id or new_call_id()))
                case Argued(text):
                    assert isinstance(self._growing, _Call), "arguments follow their call"
                    events += self._growing.grow(text, self._take_pending())
        return events

    def end(self, status: ItemStatus) -> tuple[list[OutputItem], list[Event]]:
        """End the last item; return all items, at least one, and the last item's events."""
        is_message = isinstance(self._growing, _Message)
        events = self._grow(_Message, "") if self._growing is None or (is_message and self._pending) else []
        events += self._end(status)
        return self._ended, events

    def _grow(self, kind: "type[_Reasoning | _Message]", text: str) -> list[Event]:
        if isinstance(self._growing, kind):
            return self._growing.grow(text, self._take_pending())
        ended = self._end("completed")
        item = kind(self._request_id, len(self._ended))
        return [*ended, *self._begin(item), *item.grow(text, self._take_pending())]

    def _begin(self, item: "_Growing") -> list[Event]:
        self._growing = item
        return item.begin()

    def _take_pending(self) -> list[msgspec.Raw]:
        pending, self._pending = self._pending, []
        return pending

    def _end(self, status: ItemStatus) -> list[Event]:
        ended, self._growing = self._growing, None
        if ended is None:
            return []
        item = ended.item(status)
        if self._encrypts_reasoning and isinstance(item, OutputReasoning):
            item = msgspec.structs.replace(item, encrypted_content=sealed(ended.text))
        self._ended.append(item)
        return ended.end(item)


class _Growing:
    """Output item that is still growing. Subclasses define its JSON and the fields of its events."""

    prefix: ClassVar[str]
    text_event: ClassVar[str]
    text_field: ClassVar[str] = "text"

    def __init__(self, request_id: str, index: int) -> None:
        self.item_id = f"{self.prefix}_{request_id}_{index}"
        self._index = index
        self._texts: list[str] = []
        self._logprobs: list[msgspec.Raw] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def item(self, status: ItemStatus) -> OutputItem:
        raise NotImplementedError

    def part(self) -> OutputText | ReasoningText | None:
        """Return the item's only content part so far, or None if it has no parts."""
        return None

    def begin(self) -> list[Event]:
        added = ("response.output_item.added", {"output_index": self._index, "item": self.item("in_progress")})
        return [added, *self._part_event("content_part.added")]

    def grow(self, text: str, logprobs: list[msgspec.Raw]) -> list[Event]:
        self._texts.append(text)
        self._logprobs += logprobs
        return [self._event(f"{self.text_event}.delta", delta=text, **self._text_fields(logprobs))]

    def end(self, item: OutputItem) -> list[Event]:
        text = {self.text_field: self.text} | self._text_fields(self._logprobs)
        done = self._event(f"{self.text_event}.done", **text)
        over = ("response.output_item.done", {"output_index": self._index, "item": item})
        return [done, *self._part_event("content_part.done"), over]

    def _text_fields(self, _logprobs: list[msgspec.Raw]) -> dict[str, Any]:
        """Return the additional fields of the item's text delta and done events."""
        return {"content_index": 0}

    def _part_event(self, kind: str) -> list[Event]:
        part = self.part()
        return [] if part is None else [self._event(kind, content_index=0, part=part)]

    def _event(self, kind: str, **fields: Any) -> Event:
        return f"response.{kind}", {"item_id": self.item_id, "output_index": self._index, **fields}


class _Reasoning(_Growing):
    prefix, text_event = "rs", "reasoning_text"

    def item(self, status: ItemStatus) -> OutputReasoning:
        return OutputReasoning(id=self.item_id, status=status, content=[] if status == "in_progress" else [self.part()])

    def part(self) -> ReasoningText:
        return ReasoningText(text=self.text)


class _Message(_Growing):
    prefix, text_event = "msg", "output_text"

    def item(self, status: ItemStatus) -> OutputMessage:
        return OutputMessage(id=self.item_id, status=status, content=[] if status == "in_progress" else [self.part()])

    def part(self) -> OutputText:
        return OutputText(text=self.text, logprobs=[*self._logprobs])

    def _text_fields(self, logprobs: list[msgspec.Raw]) -> dict[str, Any]:
        return {"content_index": 0, "logprobs": logprobs}


class _Call(_Growing):
    prefix, text_event, text_field = "fc", "function_call_arguments", "arguments"

    def __init__(self, request_id: str, index: int, name: str, call_id: str) -> None:
        super().__init__(request_id, index)
        self._name, self._call_id = name, call_id

    def item(self, status: ItemStatus) -> OutputCall:
        return OutputCall(id=self.item_id, status=status, call_id=self._call_id, name=self._name, arguments=self.text)

    def _text_fields(self, _logprobs: list[msgspec.Raw]) -> dict[str, Any]:
        return {}


class ResponseWriter:
    def __init__(self, request_id: str, model: ServedModel, options: ResponseOptions) -> None:
        self._tokenizer = model.tokenizer
        self._reader = new_reader(model, options.form)
        self._numbers = itertools.count()
        self._items = OutputItems(request_id, encrypts_reasoning=options.encrypts_reasoning)
        self._finish: FinishReason | None = None
        self._num_thought_tokens = 0
        self._num_tokens = 0
        self._created = _created(request_id, model, options)
        self._opening: tuple[str, ...] = ("response.created", "response.in_progress")
        """Types of the stream's first events; empty once these are written."""

    async def prepare(self, chunk: OutputChunk) -> None:
        if chunk.logprobs:
            chunk.written_logprobs = chat_logprobs(self._tokenizer, chunk)

    def chunk(self, chunk: OutputChunk, usage: Usage | None) -> bytes:
        del usage  # sent in the last event
        return self._write(self._take(chunk))

    def _take(self, chunk: OutputChunk) -> list[Event]:
        read = self._reader.read(chunk.text, is_end=chunk.finish is not None)
        events = self._items.push(read, chunk.written_logprobs)
        self._finish = chunk.finish
        self._num_tokens += len(chunk.token_ids)
        if self._items.is_thinking:
            self._num_thought_tokens = self._num_tokens
        return events

    def closing(self, usage: Usage) -> bytes:
        ended, events = self._ended(usage)
        return self._write([*events, (f"response.{ended.status}", {"response": ended})])

    def gather(self, chunk: OutputChunk) -> None:
        self._take(chunk)

    def whole(self, usage: Usage) -> bytes:
        return _encode_json(self._ended(usage)[0])

    def failed(self, error: RequestFailedError) -> bytes:
        why = ResponseError(code=error.code, message=str(error))
        failed = msgspec.structs.replace(self._created, status="failed", error=why)
        return self._write([("response.failed", {"response": failed})])

    def _ended(self, usage: Usage) -> tuple[ResponseObject, list[Event]]:
        is_cut = self._finish is FinishReason.LENGTH
        status: Literal["completed", "incomplete"] = "incomplete" if is_cut else "completed"
        items, events = self._items.end(status)
        cached = usage.prompt_tokens_details
        ended = msgspec.structs.replace(
            self._created,
            status=status,
            incomplete_details=IncompleteDetails() if is_cut else None,
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
        opening, self._opening = self._opening, ()
        frames = []
        for kind, fields in [*((kind, {"response": self._created}) for kind in opening), *events]:
            data = _encode_json({"type": kind, "sequence_number": next(self._numbers), **fields})
            frames.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
        return b"".join(frames)


def _created(request_id: str, model: ServedModel, options: ResponseOptions) -> ResponseObject:
    # The client's fields stay encoded, since some are long.
    fields: dict[str, Any] = msgspec.json.decode(options.fields, type=dict[str, msgspec.Raw])
    return ResponseObject(
        id=f"resp_{request_id}", created_at=int(time.time()), status="in_progress", model=model.name, **fields
    )
