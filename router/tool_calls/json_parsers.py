"""Incremental parsers of tool calls in Hermes and Llama formats: JSON objects with name and arguments."""

from collections.abc import Collection

import msgspec

from router.text import MarkerScanner, Trimmer
from router.tool_calls.events import Argued, CallBegun, Event, Said

_ARGUMENTS = ("arguments", "parameters")
KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
"""Allowed members of a call."""
OPENING, CLOSING = "<tool_call>", "</tool_call>"
"""Markers around calls in Hermes and Qwen models."""
PYTHON_TAG = "<|python_tag|>"
"""Optional prefix of calls in Llama models."""
_BETWEEN = " \t\r\n;"


class CallScanner:
    """Reader that scans a call's object character by character, and keeps values as they were written."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        """Expect the object's opening brace next.

        With ``names``, an object with unknown members, or with a name that is not in ``names``, is not a call.
        """
        self._names = names
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._written = ""
        """Key or value that has begun, without the characters in ``_newest``."""
        self._newest = list[str]()
        """Characters that the current ``push`` adds: adding each to the text would take quadratic time."""
        self._values: dict[str, str] = {}
        self._num_passed = 0
        """Number of characters of the arguments that were passed on."""
        self.raw = ""
        self.has_begun = False
        """True once the object is known to be a call."""
        self.is_over = False
        """True once the object is complete or known not to be a call."""

    def push(self, text: str) -> tuple[list[Event], str]:
        """Return the events that this text completes, and the text after the object."""
        events: list[Event] = []
        num_taken = 0
        while num_taken < len(text) and not self.is_over:
            if text[num_taken] == "<" and self._depth and not self._in_string:
                self.is_over = True  # the model forgot a brace before the closing marker
                break
            self._take(text[num_taken], events)
            num_taken += 1
        self._keep_newest()
        self.raw += text[:num_taken]
        if self.has_begun:
            events += self._argue()
        return events, text[num_taken:]

    def _take(self, char: str, events: list[Event]) -> None:
        if self._in_string:
            self._newest.append(char)
            self._in_string = char != '"' or self._escaped
            self._escaped = char == "\\" and not self._escaped
        elif self._depth == 0:
            self._depth = 1
            self.is_over = char != "{"
        elif self._depth == 1 and char in ":,}":
            self._divide(char, events)
        else:
            self._in_string = char == '"'
            self._depth = max(1, self._depth + (char in "{[") - (char in "}]"))
            self._newest.append(char)

    def _keep_newest(self) -> None:
        self._written += "".join(self._newest)
        self._newest.clear()

    def _divide(self, char: str, events: list[Event]) -> None:
        """End a key or value at this separator."""
        self._keep_newest()
        written, self._written = self._written.strip(), ""
        if char == ":":
            key = _string(written)
            is_known = self._names is None or key in KEYS
            self.is_over = key is None or self._key is not None or not is_known
            self._key = key
            return
        if self._key is None:
            self.is_over = bool(written) or char == "}"
            return
        self._values.setdefault(self._key, written)
        if self._key == "name" and not self.has_begun:
            self._begin(written, events)
        self._key = None
        self.is_over = self.is_over or char == "}"

    def _begin(self, written: str, events: list[Event]) -> None:
        name = _string(written)
        if not name or (self._names is not None and name not in self._names):
            self.is_over = True
        else:
            self.has_begun = True
            events.append(CallBegun(name))

    def _argue(self) -> list[Event]:
        """Return the new part of the first arguments; a call without any gets ``{}``."""
        known = next((value for key, value in self._values.items() if key in _ARGUMENTS), None)
        if known is None:
            known = self._written.strip() if self._key in _ARGUMENTS else ""
        if self.is_over:
            known = known or "{}"
        new, self._num_passed = known[self._num_passed :], max(self._num_passed, len(known))
        return [Argued(new)] if new else []


class HermesParser:
    """Parser of ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` within any text.

    White space around calls is dropped, and text between markers that is not a call is passed on. Calls to unknown
    functions are passed on as calls, and the client answers them.
    """

    def __init__(self) -> None:
        # Models forget the closing marker, or write several calls before it.
        self._opening, self._next = MarkerScanner(OPENING), MarkerScanner(CLOSING, OPENING, "{")
        self._text = Trimmer(keeps_start=True)
        self._call: CallScanner | None = None
        self._last: CallScanner | None = None
        """Call before the current object, after the same opening marker."""
        self._has_called = False

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        rest: str | None = text
        while rest:
            rest = self._say(rest, events) if self._call is None else self._follow(self._call, rest, events)
        return events

    def flush(self) -> list[Event]:
        if self._call is not None:
            return [] if self._call.has_begun else self._unread(self._call)
        said = self._text.push(self._opening.flush())
        end = self._text.flush()
        return [Said(said + end)] if said or (end and not self._has_called) else []

    def _say(self, text: str, events: list[Event]) -> str | None:
        """Pass on the text before the next call; return the text after its marker."""
        before, after = self._opening.push(text)
        if said := self._text.push(before):
            events.append(Said(said))
        if after is not None:
            self._call = CallScanner()
        return after

    def _follow(self, call: CallScanner, text: str, events: list[Event]) -> str | None:
        """Read the current call; return the text after it."""
        if call.has_begun and call.is_over:
            _, after = self._next.push(text)
            if after is None:
                return None
            self._call = None if self._next.hit == CLOSING else CallScanner()
            self._last = call if self._next.hit == "{" else None
            return after if self._last is None else "{" + after
        found, rest = call.push(text if call.raw else text.lstrip())
        if call.has_begun:
            self._has_called = True
            self._text = Trimmer()
        elif call.is_over:
            found += self._unread(call)
            self._call = self._last
        events += found
        return rest

    def _unread(self, call: CallScanner) -> list[Event]:
        said = self._text.push(OPENING + call.raw) if self._last is None else ""
        return [Said(said)] if said else []


class Llama3Parser:
    """Parser of Llama 3.1's ``{"name": ..., "parameters": {...}}``, or several of them separated by ";".

    An answer that begins with anything else has no calls, and a JSON object that is not a call is passed on.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        """Text that can precede a call."""
        self._call: CallScanner | None = None
        self._has_called = False
        self._is_text = False
        """True once no call can follow."""

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        rest = text
        while rest:
            if self._is_text:
                events.append(Said(rest))
                rest = ""
            elif self._call is None:
                rest = self._look(rest)
            else:
                rest = self._follow(self._call, rest, events)
        return events

    def flush(self) -> list[Event]:
        unread = self._held + self._call.raw if self._call is not None else self._held
        is_call = self._call is not None and self._call.has_begun
        if is_call or (self._has_called and not unread.strip(_BETWEEN)):
            return []
        return [Said(unread)] if unread else []

    def _look(self, text: str) -> str:
        """Decide whether a call or text begins here; return the rest of the text."""
        whole, self._held = self._held + text, ""
        start = whole.lstrip(_BETWEEN if self._has_called else None)
        body = start.removeprefix(PYTHON_TAG).lstrip() if start.startswith(PYTHON_TAG) else start
        if body.startswith("{"):
            self._call = CallScanner(self._names)
            self._held = whole[: len(whole) - len(body)]
            return body
        if body and not PYTHON_TAG.startswith(body):
            self._is_text = True
            return start if self._has_called else whole
        self._held = whole
        return ""

    def _follow(self, call: CallScanner, text: str, events: list[Event]) -> str:
        """Read the current call; return the text after it."""
        found, rest = call.push(text)
        events += found
        if call.has_begun:
            self._has_called, self._held = True, ""
        if call.is_over:
            self._call = None
            if not call.has_begun:
                self._is_text = True
                unread, self._held = self._held + call.raw, ""
                return unread + rest
        return rest


def _string(written: str) -> str | None:
    try:
        return msgspec.json.decode(written, type=str)
    except msgspec.DecodeError:
        return None
