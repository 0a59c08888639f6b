"""Calls of Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, amid any text."""

from collections.abc import Collection

from router.marker import MarkerScanner, Trimmer
from router.tool_calls.call_scanner import CallScanner, Event, Said

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class HermesParser:
    """Drops white space around calls; passes on marked text that is no call."""

    def __init__(self, names: Collection[str]) -> None:
        """Ignore ``names``: calls of unknown functions are calls too, for the client to answer."""
        del names
        self._opening, self._closing = MarkerScanner(OPENING), MarkerScanner(CLOSING)
        self._text = Trimmer(keeps_start=True)
        self._call: CallScanner | None = None
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
        """Pass on text up to the next call; return the text after its marker."""
        before, after = self._opening.push(text)
        if said := self._text.push(before):
            events.append(Said(said))
        if after is not None:
            self._call = CallScanner()
        return after

    def _follow(self, call: CallScanner, text: str, events: list[Event]) -> str | None:
        """Read the current call; return the text after it."""
        if call.has_begun and call.is_over:
            _, after = self._closing.push(text)
            if after is not None:
                self._call = None
            return after
        found, rest = call.push(text if call.raw else text.lstrip())
        if call.has_begun:
            self._has_called = True
            self._text = Trimmer()
        elif call.is_over:
            found += self._unread(call)
            self._call = None
        events += found
        return rest

    def _unread(self, call: CallScanner) -> list[Event]:
        said = self._text.push(OPENING + call.raw)
        return [Said(said)] if said else []
