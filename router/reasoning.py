"""Thoughts before an answer in the form of Qwen3's chat template: ``<think>`` thoughts ``</think>`` answer."""

from enum import Enum

from cluster.spec.config import ReasoningParser
from router.marker import MarkerScanner, Trimmer

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
