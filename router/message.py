"""Conversion of an answer's text to a chat message: reasoning, content and tool calls, complete or in parts.

Reasoning is marked as in Qwen3's chat template: ``<think>`` reasoning ``</think>`` answer.
"""

import secrets
from dataclasses import dataclass, field
from enum import Enum

from cluster.spec.router_config import ReasoningParser
from router.text import MarkerScanner, Trimmer
from router.tool_calls.events import Argued, CallBegun, Event, Said, ToolParser

OPENING, CLOSING = "<think>", "</think>"


class Thinking(Enum):
    """Presence of reasoning at the beginning of an answer."""

    NONE = "none"
    OPTIONAL = "optional"
    """Reasoning is present if the answer begins with the opening marker."""
    BEGUN = "begun"
    """Reasoning is present, because the prompt ends with the opening marker."""


def has_reasoning(setting: ReasoningParser, template: str | None) -> bool:
    """Return whether the model with this chat template reasons before it answers."""
    return setting == "qwen3" or (setting == "auto" and template is not None and CLOSING in template)


def reasoning_after(prompt: str) -> Thinking:
    """Return how the answer to a rendered prompt begins."""
    end = prompt[-64:].rstrip()
    if end.endswith(CLOSING):
        return Thinking.NONE
    return Thinking.BEGUN if end.endswith(OPENING) else Thinking.OPTIONAL


class ReasoningSplitter:
    """Splits a text into reasoning and answer, and strips the white space around the reasoning."""

    def __init__(self, thinking: Thinking) -> None:
        self._start: str | None = None if thinking is Thinking.NONE else ""
        """Text that may begin the opening marker, which some models repeat; None once this is decided."""
        self._thinks = thinking is Thinking.BEGUN
        self._scanner = MarkerScanner(CLOSING)
        self._reasoning = Trimmer()
        self._answer = Trimmer(keeps_start=thinking is Thinking.NONE)

    def push(self, text: str) -> tuple[str, str]:
        """Return the next part of the reasoning and of the answer."""
        if self._start is not None:
            self._start, text = self._decide(self._start + text)
        if not self._thinks:
            return "", self._answer.push(text)
        before, after = self._scanner.push(text)
        reasoning = self._reasoning.push(before)
        if after is None:
            return reasoning, ""
        self._thinks = False
        self._reasoning.flush()
        return reasoning, self._answer.push(after)

    def flush(self) -> tuple[str, str]:
        if self._thinks:
            reasoning = self._reasoning.push((self._start or "") + self._scanner.flush())
            return reasoning + self._reasoning.flush(), ""
        return "", self._answer.push(self._start or "") + self._answer.flush()

    def _decide(self, start: str) -> tuple[str | None, str]:
        """Return the undecided text, and the text to process."""
        stripped = start.lstrip()
        if stripped.startswith(OPENING):
            self._thinks = True
            return None, stripped.removeprefix(OPENING)
        if OPENING.startswith(stripped):
            return start, ""
        if not self._thinks:
            self._answer = Trimmer(keeps_start=True)
        return None, start


@dataclass(frozen=True, slots=True)
class ReasoningEvent:
    text: str


MessageEvent = ReasoningEvent | Event


@dataclass(slots=True, kw_only=True)
class CallPart:
    index: int
    id: str = ""
    """Id of the call. Like the name, it is set only in the call's first part."""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True, kw_only=True)
class MessagePart:
    """Next part of a message, or the complete message."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPart] = field(default_factory=list)
    """Parts of calls, at most one per call."""


class MessageReader:
    """Reader that splits one choice's text, as it arrives, into reasoning, content and tool calls."""

    def __init__(self, thinking: Thinking = Thinking.NONE, parser: ToolParser | None = None) -> None:
        self._splitter = ReasoningSplitter(thinking) if thinking is not Thinking.NONE else None
        self._parser = parser
        self._num_calls = 0

    @property
    def has_called(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str, *, is_end: bool) -> MessagePart:
        """Return the part of the message that this text completes; ``is_end`` marks the last text."""
        part = MessagePart()
        for event in self.read(text, is_end=is_end):
            self._add(part, event)
        return part

    def read(self, text: str, *, is_end: bool) -> list[MessageEvent]:
        """Return the events that this text completes, in order; an alternative to ``push``."""
        pieces = [("", text)] if self._splitter is None else [self._splitter.push(text)]
        if is_end and self._splitter is not None:
            pieces.append(self._splitter.flush())
        events: list[MessageEvent] = []
        for reasoning, answer in pieces:
            if reasoning:
                events.append(ReasoningEvent(reasoning))
            if answer:
                events += [Said(answer)] if self._parser is None else self._parser.push(answer)
        if is_end and self._parser is not None:
            events += self._parser.flush()
        return events

    def _add(self, part: MessagePart, event: MessageEvent) -> None:
        match event:
            case ReasoningEvent(text):
                part.reasoning += text
            case Said(text):
                part.content += text
            case CallBegun(name, call_id):
                part.calls.append(CallPart(index=self._num_calls, id=call_id or new_call_id(), name=name))
                self._num_calls += 1
            case Argued(text):
                if not part.calls:
                    part.calls.append(CallPart(index=self._num_calls - 1))
                part.calls[-1].arguments += text


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
