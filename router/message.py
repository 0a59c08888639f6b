"""Conversion of one chat answer's text to its message: thoughts, content and tool calls, whole or in parts.

Thoughts have the form of Qwen3's chat template: ``<think>`` thoughts ``</think>`` answer.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from cluster.spec.config import ReasoningParser
from router.text import MarkerScanner, Trimmer
from router.tool_calls.parsers import Argued, CallBegun, Event, Said, ToolParser

OPENING, CLOSING = "<think>", "</think>"


class Thinking(Enum):
    """Thoughts that may precede an answer."""

    NONE = "none"
    """Nothing is split off."""
    OPTIONAL = "optional"
    """Thoughts, if the answer begins with the opening marker."""
    BEGUN = "begun"
    """Thoughts; the prompt ends with the opening marker."""


def has_thoughts(setting: ReasoningParser, template: str | None) -> bool:
    """Return whether thoughts are split off the answers of a model with this chat template."""
    return setting == "qwen3" or (setting == "auto" and template is not None and CLOSING in template)


def thinking_after(prompt: str) -> Thinking:
    """Return what may precede the answer to a rendered prompt."""
    end = prompt[-64:].rstrip()
    if end.endswith(CLOSING):
        return Thinking.NONE
    return Thinking.BEGUN if end.endswith(OPENING) else Thinking.OPTIONAL


class ThoughtSplitter:
    """Splits a text into thoughts and answer, without the white space around the thoughts."""

    def __init__(self, thinking: Thinking) -> None:
        self._start: str | None = "" if thinking is Thinking.OPTIONAL else None
        """Text that may begin the opening marker; None once that is decided."""
        self._thinks = thinking is Thinking.BEGUN
        self._scanner = MarkerScanner(CLOSING)
        self._thoughts = Trimmer()
        self._answer = Trimmer(keeps_start=thinking is Thinking.NONE)

    def push(self, text: str) -> tuple[str, str]:
        """Return thoughts and answer that this text completes."""
        if self._start is not None:
            self._start, text = self._decide(self._start + text)
        if not self._thinks:
            return "", self._answer.push(text)
        before, after = self._scanner.push(text)
        thoughts = self._thoughts.push(before)
        if after is None:
            return thoughts, ""
        self._thinks = False
        self._thoughts.flush()
        return thoughts, self._answer.push(after)

    def flush(self) -> tuple[str, str]:
        if self._thinks:
            thoughts = self._thoughts.push(self._scanner.flush())
            return thoughts + self._thoughts.flush(), ""
        return "", self._answer.push(self._start or "") + self._answer.flush()

    def _decide(self, start: str) -> tuple[str | None, str]:
        """Return the undecided text, and the text to process."""
        stripped = start.lstrip()
        if stripped.startswith(OPENING):
            self._thinks = True
            return None, stripped.removeprefix(OPENING)
        if OPENING.startswith(stripped):
            return start, ""
        self._answer = Trimmer(keeps_start=True)
        return None, start


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


MessageEvent = Thought | Event


@dataclass(slots=True, kw_only=True)
class CallPart:
    """The next part of one tool call."""

    index: int
    id: str = ""
    """Call id, in the first part; empty in the others, like the name."""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True, kw_only=True)
class MessagePart:
    """The next part of a message, or the whole."""

    thoughts: str = ""
    content: str = ""
    calls: list[CallPart] = field(default_factory=list)
    """Calls, at most one part per call."""


class MessageReader:
    def __init__(self, thinking: Thinking = Thinking.NONE, parser: ToolParser | None = None) -> None:
        self._splitter = ThoughtSplitter(thinking) if thinking is not Thinking.NONE else None
        self._parser = parser
        self._num_calls = 0

    @property
    def has_called(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str, *, is_end: bool) -> MessagePart:
        """Return what this text completes; with ``is_end`` also what was held back."""
        part = MessagePart()
        for event in self.read(text, is_end=is_end):
            self._add(part, event)
        return part

    def read(self, text: str, *, is_end: bool) -> list[MessageEvent]:
        """Return the events that this text completes, in order; instead of ``push``."""
        events = self._split(text)
        if is_end:
            events += self._flush()
        return events

    def _split(self, text: str) -> list[MessageEvent]:
        if self._splitter is None:
            return self._parse(text)
        thoughts, answer = self._splitter.push(text)
        return [*_thought(thoughts), *self._parse(answer)]

    def _parse(self, answer: str) -> list[MessageEvent]:
        if not answer:
            return []
        return [Said(answer)] if self._parser is None else list(self._parser.push(answer))

    def _flush(self) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        if self._splitter is not None:
            thoughts, answer = self._splitter.flush()
            events += [*_thought(thoughts), *self._parse(answer)]
        return events if self._parser is None else [*events, *self._parser.flush()]

    def _add(self, part: MessagePart, event: MessageEvent) -> None:
        match event:
            case Thought(text):
                part.thoughts += text
            case Said(text):
                part.content += text
            case CallBegun(name):
                part.calls.append(CallPart(index=self._num_calls, id=new_call_id(), name=name))
                self._num_calls += 1
            case Argued(text):
                if not part.calls:
                    part.calls.append(CallPart(index=self._num_calls - 1))
                part.calls[-1].arguments += text


def new_call_id() -> str:
    """Draw the id that a call's result will refer to."""
    return f"call_{secrets.token_hex(12)}"


def _thought(text: str) -> list[Thought]:
    return [Thought(text)] if text else []


NewReader = Callable[[], MessageReader]
