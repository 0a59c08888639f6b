"""Calls of Llama 3.1 and later: ``{"name": ..., "parameters": {...}}``, or several with ";" between."""

from collections.abc import Collection

from router.tool_calls.call_scanner import CallScanner, Event, Said

TAG = "<|python_tag|>"
"""May precede a call."""

_BETWEEN = " \t\r\n;"


class Llama3Parser:
    """An answer that begins with something else has no calls; a JSON object that is no call is passed on."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        """Text that may precede a call."""
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
        """Decide what begins here; return the text that continues it."""
        whole, self._held = self._held + text, ""
        start = whole.lstrip(_BETWEEN if self._has_called else None)
        body = start.removeprefix(TAG).lstrip() if start.startswith(TAG) else start
        if body.startswith("{"):
            self._call = CallScanner(self._names)
            self._held = whole[: len(whole) - len(body)]
            return body
        if body and not TAG.startswith(body):
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
