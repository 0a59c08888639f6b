"""From the text of one chat answer to its message: thoughts, content and tool calls, whole or part by part."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.reasoning import Thinking, ThoughtSplitter
from router.tool_calls.events import Argued, CallBegun, Event, Said, ToolParser


@dataclass(slots=True, kw_only=True)
class CallPart:
    """The next part of one tool call."""

    index: int
    id: str = ""
    """Of the first part; empty in the others, like the name."""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True, kw_only=True)
class MessagePart:
    """The next part of a message; several in a row, or the whole."""

    thoughts: str = ""
    content: str = ""
    calls: list[CallPart] = field(default_factory=list)
    """At most one part of each call."""


class MessageReader:
    """Reads the answer of one choice."""

    def __init__(self, thinking: Thinking = Thinking.NONE, parser: ToolParser | None = None) -> None:
        self._splitter = ThoughtSplitter(thinking) if thinking is not Thinking.NONE else None
        self._parser = parser
        self._num_calls = 0

    @property
    def has_called(self) -> bool:
        """A tool call came."""
        return self._num_calls > 0

    def push(self, text: str, *, is_end: bool) -> MessagePart:
        """What this text completes; with ``is_end`` also what was held back."""
        part = MessagePart()
        self._split(part, text)
        if is_end:
            self._end(part)
        return part

    def _split(self, part: MessagePart, text: str) -> None:
        thoughts, answer = self._splitter.push(text) if self._splitter is not None else ("", text)
        part.thoughts += thoughts
        self._parse(part, answer)

    def _parse(self, part: MessagePart, answer: str) -> None:
        if self._parser is None:
            part.content += answer
        elif answer:
            self._add(part, self._parser.push(answer))

    def _end(self, part: MessagePart) -> None:
        if self._splitter is not None:
            thoughts, answer = self._splitter.flush()
            part.thoughts += thoughts
            self._parse(part, answer)
        if self._parser is not None:
            self._add(part, self._parser.flush())

    def _add(self, part: MessagePart, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Said(text):
                    part.content += text
                case CallBegun(name):
                    part.calls.append(CallPart(index=self._num_calls, id=f"call_{secrets.token_hex(12)}", name=name))
                    self._num_calls += 1
                case Argued(text):
                    if not part.calls:
                        part.calls.append(CallPart(index=self._num_calls - 1))
                    part.calls[-1].arguments += text


NewReader = Callable[[], MessageReader]
