"""Reads one line of an OpenAI event stream. No I/O, so that chat and the load generator share it."""

import json
from typing import Any


def parse_line(line: str) -> dict[str, Any] | None:
    """The object of a ``data:`` line; None for comments, blank lines and the closing ``[DONE]``.

    Raises:
        ValueError: the line holds data that is not a JSON object.
    """
    if not line.startswith("data:"):
        return None
    text = line.removeprefix("data:").strip()
    if text == "[DONE]":
        return None
    try:
        event = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"an event of the stream is nested too deeply: {text[:80]!r}") from error
    if not isinstance(event, dict):
        raise ValueError(f"an event of the stream is {text[:80]!r}, not a JSON object")
    return event


def error_message(body: str) -> str:
    """What an OpenAI-shaped error says, or the beginning of the body if it has another shape."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        return body.strip()[:200] or "empty response"
