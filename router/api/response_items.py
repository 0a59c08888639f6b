"""The growing items of one answer of ``/v1/responses`` (thoughts, messages, calls), and their events."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from router.api.response_objects import (
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputThoughts,
    ReasoningText,
)
from router.api.response_request import sealed
from router.api.responses import ChosenLogprob
from router.message import MessageEvent, Thought, new_call_id
from router.tool_calls.call_scanner import Argued, CallBegun, Said

Event = tuple[str, dict[str, Any]]
"""Type and fields of a server-sent event."""


class OutputItems:
    """The items so far. One grows at a time; what belongs to another one ends it."""

    def __init__(self, request_id: str, *, seals_thoughts: bool = False) -> None:
        """``seals_thoughts`` adds a form of thoughts for clients that keep no other."""
        self._request_id = request_id
        self._seals_thoughts = seals_thoughts
        self._ended: list[OutputItem] = []
        self._growing: _Growing | None = None
        self._pending: list[ChosenLogprob] = []
        """Log-probabilities of tokens whose text has not come."""

    @property
    def is_thinking(self) -> bool:
        return isinstance(self._growing, _Thoughts)

    def push(self, read: Sequence[MessageEvent], logprobs: Sequence[ChosenLogprob] = ()) -> list[Event]:
        """Take what follows in the message, and the log-probabilities of its tokens."""
        self._pending += logprobs
        events: list[Event] = []
        for event in read:
            match event:
                case Thought(text):
                    events += self._grow(_Thoughts, text)
                case Said(text):
                    events += self._grow(_Message, text)
                case CallBegun(name):
                    events += self._begin(partial(_Call, name))
                case Argued(text):
                    events += self._grow(_Call, text)
        return events

    def end(self, status: ItemStatus) -> tuple[list[OutputItem], list[Event]]:
        """Return every item, at least one, and the events of the last one's end."""
        is_message = isinstance(self._growing, _Message)
        events = self._grow(_Message, "") if self._growing is None or (is_message and self._pending) else []
        events += self._end(status)
        return self._ended, events

    def _grow(self, kind: "type[_Thoughts | _Message | _Call]", text: str) -> list[Event]:
        events: list[Event] = []
        if not isinstance(self._growing, kind):
            assert not issubclass(kind, _Call), "arguments follow their call"
            events += self._begin(kind)
        assert self._growing is not None
        logprobs, self._pending = self._pending, []
        return events + self._growing.grow(text, logprobs)

    def _begin(self, make: "Callable[[str, int], _Growing]") -> list[Event]:
        events = self._end("completed")
        index = len(self._ended)
        self._growing = make(f"{self._request_id}_{index}", index)
        return events + self._growing.begin()

    def _end(self, status: ItemStatus) -> list[Event]:
        ended, self._growing = self._growing, None
        if ended is None:
            return []
        item = ended.item(status)
        if self._seals_thoughts and isinstance(item, OutputThoughts):
            item = msgspec.structs.replace(item, encrypted_content=sealed(ended.text))
        self._ended.append(item)
        return ended.end(item)


class _Growing(ABC):
    def __init__(self, item_id: str, index: int) -> None:
        self.item_id = item_id
        self._index = index
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """Return the item as it stands."""

    @abstractmethod
    def grow(self, text: str, logprobs: list[ChosenLogprob]) -> list[Event]:
        """Add text, with the log-probabilities of its tokens where requested."""
        self._texts.append(text)
        return []

    def begin(self) -> list[Event]:
        return [("response.output_item.added", {"output_index": self._index, "item": self.item("in_progress")})]

    def end(self, item: OutputItem) -> list[Event]:
        return [("response.output_item.done", {"output_index": self._index, "item": item})]

    def event(self, kind: str, **fields: Any) -> Event:
        return f"response.{kind}", {"item_id": self.item_id, "output_index": self._index, **fields}


class _Thoughts(_Growing):
    def __init__(self, item_id: str, index: int) -> None:
        super().__init__(f"rs_{item_id}", index)

    def item(self, status: ItemStatus) -> OutputThoughts:
        content = [] if status == "in_progress" else [ReasoningText(text=self.text)]
        return OutputThoughts(id=self.item_id, status=status, content=content)

    def begin(self) -> list[Event]:
        return [*super().begin(), self.event("content_part.added", content_index=0, part=ReasoningText(text=""))]

    def grow(self, text: str, logprobs: list[ChosenLogprob]) -> list[Event]:
        super().grow(text, logprobs)
        return [self.event("reasoning_text.delta", content_index=0, delta=text)]

    def end(self, item: OutputItem) -> list[Event]:
        done = self.event("reasoning_text.done", content_index=0, text=self.text)
        part = self.event("content_part.done", content_index=0, part=ReasoningText(text=self.text))
        return [done, part, *super().end(item)]


class _Message(_Growing):
    def __init__(self, item_id: str, index: int) -> None:
        super().__init__(f"msg_{item_id}", index)
        self._logprobs: list[ChosenLogprob] = []

    @property
    def _part(self) -> OutputText:
        return OutputText(text=self.text, logprobs=self._logprobs)

    def item(self, status: ItemStatus) -> OutputMessage:
        content = [] if status == "in_progress" else [self._part]
        return OutputMessage(id=self.item_id, status=status, content=content)

    def begin(self) -> list[Event]:
        return [*super().begin(), self.event("content_part.added", content_index=0, part=OutputText(text=""))]

    def grow(self, text: str, logprobs: list[ChosenLogprob]) -> list[Event]:
        super().grow(text, logprobs)
        self._logprobs += logprobs
        return [self.event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def end(self, item: OutputItem) -> list[Event]:
        done = self.event("output_text.done", content_index=0, text=self.text, logprobs=self._logprobs)
        return [done, self.event("content_part.done", content_index=0, part=self._part), *super().end(item)]


class _Call(_Growing):
    def __init__(self, name: str, item_id: str, index: int) -> None:
        super().__init__(f"fc_{item_id}", index)
        self._name = name
        self._call_id = new_call_id()

    def item(self, status: ItemStatus) -> OutputCall:
        return OutputCall(id=self.item_id, status=status, call_id=self._call_id, name=self._name, arguments=self.text)

    def grow(self, text: str, logprobs: list[ChosenLogprob]) -> list[Event]:
        super().grow(text, logprobs)
        return [self.event("function_call_arguments.delta", delta=text)]

    def end(self, item: OutputItem) -> list[Event]:
        return [self.event("function_call_arguments.done", arguments=self.text), *super().end(item)]
