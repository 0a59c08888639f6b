"""Incremental parser of tool calls between tags, as DeepSeek, GLM, Kimi and Qwen3-Coder write them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence

from router.text import MarkerScanner, Trimmer
from router.tool_calls.arguments import ParameterTypes, to_json
from router.tool_calls.events import Argued, CallBegun, Event, Said
from router.tool_calls.forms import CallForm, ParameterForm

_NAME = re.compile(r"\s*\S{0,256}\s*")
_NUMBERED = re.compile(r"(?:functions\.)?(.+):\d+")
_KEY = re.compile(r"\s*(.*?)\s*(?:</arg_key>\s*|\" string=\"(true|false))?", re.DOTALL)
"""Name of a parameter, and whether its value is a text, if the model says so."""

Read = Callable[[str, str | None], None]
"""Function that reads text up to a marker, or a part of it without one."""


class TaggedParser:
    """Parser of calls within any text, which reads the text between one marker and the next.

    White space around calls is dropped, and text after an opening marker that is not a call is passed on. Calls to
    unknown functions are passed on as calls, and the client answers them.
    """

    def __init__(self, form: CallForm, types: Mapping[str, ParameterTypes]) -> None:
        """Expect text; ``types`` has the JSON types of each function's parameters."""
        self._form, self._types = form, types
        self._begin, self._opening, self._middle = form.begin.strip(), form.opening.strip(), form.middle.strip()
        self._parameter = "" if form.parameter is None else form.parameter.opening.strip()
        self._closing, self._end = form.closing.strip(), form.end.strip()
        self._text = Trimmer(keeps_start=True)
        self._has_called = False
        self._unread = ""
        """Text since an opening marker, passed on if it is not a call."""
        self._name = ""
        self._arguments: _Object | _Parameters = _Object()
        self._events: list[Event] = []
        self._expect_text()

    def push(self, text: str) -> list[Event]:
        rest: str | None = text
        while rest is not None:
            scanner = self._scanner
            before, rest = scanner.push(rest)
            self._read(before, None if rest is None else scanner.hit)
            if rest is None and scanner is not self._scanner:
                rest = scanner.flush() or None  # the beginning of a marker that is no longer expected
        return self._take_events()

    def flush(self) -> list[Event]:
        self._read(self._scanner.flush(), None)
        self._say(self._take_unread())
        if (end := self._text.flush()) and not self._has_called:
            self._events.append(Said(end))
        return self._take_events()

    def _expect(self, read: Read, *markers: str) -> None:
        self._read, self._scanner = read, MarkerScanner(*filter(None, markers))

    def _expect_text(self) -> None:
        # Models forget the marker before the first call.
        self._expect(self._read_text, self._begin, self._opening)

    def _expect_calls(self) -> None:
        self._expect(self._read_between, self._opening, self._end)

    def _read_text(self, text: str, hit: str | None) -> None:
        self._say(text)
        if hit is not None:
            self._open(hit)

    def _open(self, marker: str) -> None:
        """Read on after the marker before all calls, or before one."""
        self._unread += marker
        if marker == self._opening:
            self._expect(self._read_name, self._middle, self._closing, self._parameter, self._begin, self._opening)
        else:
            self._expect_calls()

    def _read_between(self, text: str, hit: str | None) -> None:
        """Read text between calls, or before the first one."""
        is_call, is_blank = not self._unread, not text.strip()
        if is_call or not is_blank:
            self._say(self._take_unread() + text)
        else:
            self._unread += text
        if hit == self._opening:
            self._open(hit)
        elif hit is not None:
            self._say("" if is_call else self._take_unread() + hit)
            self._expect_text()
        elif not is_call and not is_blank:
            self._expect_text()

    def _read_name(self, text: str, hit: str | None) -> None:
        self._name += text
        name, opens = self._name.strip(), hit in (self._begin, self._opening)
        if opens or not _NAME.fullmatch(self._name) or (hit is not None and not name):
            self._say(self._take_unread() + ("" if opens else hit or ""))
            self._expect_text()
            if opens and hit is not None:
                self._open(hit)
        elif hit is not None:
            self._begin_call(name, hit)

    def _begin_call(self, name: str, hit: str) -> None:
        number = _NUMBERED.fullmatch(name) if self._form.is_numbered else None
        begun = CallBegun(number[1], name) if number else CallBegun(name)
        self._events.append(begun)
        self._has_called, self._text = True, Trimmer()
        self._take_unread()
        form = self._form.parameter
        self._arguments = _Object() if form is None else _Parameters(form, self._types.get(begun.name, {}))
        self._expect_arguments()
        if hit != self._middle:
            self._read("", hit)

    def _expect_arguments(self) -> None:
        self._expect(self._read_arguments, self._closing, self._end, self._parameter)

    def _read_arguments(self, text: str, hit: str | None) -> None:
        """Read an object, or text between parameters."""
        self._argue(self._arguments.between(text))
        if isinstance(self._arguments, _Parameters) and hit == self._parameter:
            self._expect(self._read_key, self._arguments.key_end)
        elif hit is not None:
            self._argue(self._arguments.end())
            if hit == self._end or not self._end:
                self._expect_text()
            else:
                self._expect_calls()

    def _read_key(self, text: str, hit: str | None) -> None:
        assert isinstance(self._arguments, _Parameters), "only parameters have keys"
        self._arguments.key += text
        if hit is not None:
            self._argue(self._arguments.begin_value())
            self._expect(self._read_value, self._arguments.closing)

    def _read_value(self, text: str, hit: str | None) -> None:
        assert isinstance(self._arguments, _Parameters), "only parameters have values"
        self._argue(self._arguments.value(text, is_end=hit is not None))
        if hit is not None:
            self._expect_arguments()

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(Argued(text))

    def _say(self, text: str) -> None:
        if said := self._text.push(text):
            self._events.append(Said(said))

    def _take_unread(self) -> str:
        unread, self._unread, self._name = self._unread + self._name, "", ""
        return unread

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class _Object:
    """Arguments of one call, written as an object."""

    def __init__(self) -> None:
        self._text = Trimmer()
        self._is_empty = True

    def between(self, text: str) -> str:
        said = self._text.push(text)
        self._is_empty = self._is_empty and not said
        return said

    def end(self) -> str:
        return "{}" if self._is_empty else ""


class _Parameters:
    """Parameters of one call, converted to the members of an object."""

    def __init__(self, form: ParameterForm, types: ParameterTypes) -> None:
        self.key_end, self.closing = form.key_end, form.closing.strip()
        self.key = ""
        self._has_newlines = form.has_newlines
        self._types = types
        self._is_empty = True
        self._types_here: Sequence[str] | None = None
        """Types of the current value; None for any."""
        self._written = ""
        """Current value so far, unless it is certain to be a text."""
        self._held: str | None = None
        """Line break that may end the value; None before the value's first character."""

    def between(self, _text: str) -> str:
        return ""

    def begin_value(self) -> str:
        """Begin the value of ``key``; return the member up to it."""
        found = _KEY.fullmatch(self.key)
        assert found is not None, "every text matches"
        name, is_text = found.groups()
        self._types_here = self._types.get(name) if is_text is None else ["string"] if is_text == "true" else None
        opening = "{" if self._is_empty else ", "
        self.key, self._is_empty, self._written, self._held = "", False, "", None
        return f"{opening}{json.dumps(name, ensure_ascii=False)}: " + ('"' if self._is_text else "")

    def value(self, text: str, *, is_end: bool) -> str:
        """Add to the value; return the JSON that it completes."""
        new = self._without_newlines(text) if self._has_newlines else text
        if self._is_text:
            return json.dumps(new, ensure_ascii=False)[1:-1] + ('"' if is_end else "")
        self._written += new
        return to_json(self._written, self._types_here) if is_end else ""

    def end(self) -> str:
        return "{}" if self._is_empty else "}"

    @property
    def _is_text(self) -> bool:
        return self._types_here == ["string"]

    def _without_newlines(self, text: str) -> str:
        """Return the text that is certainly part of the value."""
        if not text:
            return ""
        whole = text.removeprefix("\n") if self._held is None else self._held + text
        known = whole.removesuffix("\n")
        self._held = whole[len(known) :]
        return known
