"""Sends one streaming completion and notes when its pieces come."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from cluster.bench.sse import error_message, parse_line
from cluster.bench.statistics import RequestRecord

_RUN_SALT = secrets.token_hex(8)
"""So that a run finds nothing that an earlier one left in a prefix cache."""

_NO_TOKEN = "there is no token"
"""So the router refuses ids beyond the model's vocabulary."""
_FEW_TOKENS = "; the model's vocabulary is smaller than --vocab-size says"


class StreamError(Exception):
    """A request that did not bring a whole answer; the message is what the report counts."""


@dataclass(slots=True)
class _Progress:
    arrivals_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    timeline_path: str | None = None
    finished: bool = False


async def complete(
    client: httpx.AsyncClient, model: str, prompt: list[int], output_len: int, *, timed: bool = False
) -> RequestRecord:
    """Ask for exactly ``output_len`` tokens after a prompt of token ids; a failure is in the record, not raised.

    With ``timed`` the endpoint is asked to keep a timeline, and the record says where.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": _RUN_SALT,
        "stream_options": {"include_usage": True},
    } | ({"timeline": True} if timed else {})
    progress = _Progress()
    sent_s = time.monotonic()
    try:
        await _read_stream(client, body, progress)
        error = _shortfall(progress, output_len)
    except (httpx.HTTPError, StreamError, ValueError) as failure:
        error = str(failure) or type(failure).__name__
    return RequestRecord(
        sent_s=sent_s,
        ended_s=time.monotonic(),
        arrivals_s=tuple(progress.arrivals_s),
        num_prompt_tokens=progress.num_prompt_tokens,
        num_output_tokens=progress.num_output_tokens,
        num_cached_tokens=progress.num_cached_tokens,
        timeline_path=progress.timeline_path,
        error=error,
    )


async def _read_stream(client: httpx.AsyncClient, body: Mapping[str, Any], progress: _Progress) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            message = error_message(response.text)
            advice = _FEW_TOKENS if _NO_TOKEN in message else ""
            raise StreamError(f"HTTP {response.status_code}: {message}{advice}")
        progress.timeline_path = response.headers.get("x-baton-timeline")
        async for line in response.aiter_lines():
            event = parse_line(line)
            if event is not None:
                _note(event, progress)


def _note(event: Mapping[str, Any], progress: _Progress) -> None:
    if "error" in event:
        raise StreamError(f"in the stream: {event['error'].get('message', event['error'])}")
    for choice in event.get("choices", ()):
        finished = choice.get("finish_reason") is not None
        progress.finished |= finished
        if _brings_tokens(choice, finished):
            progress.arrivals_s.append(time.monotonic())
    if usage := event.get("usage"):
        progress.num_prompt_tokens = usage["prompt_tokens"]
        progress.num_output_tokens = usage["completion_tokens"]
        progress.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _brings_tokens(choice: Mapping[str, Any], finished: bool) -> bool:
    """By token ids where the server gives them. Elsewhere by text, which may be empty except beside the finish."""
    if "token_ids" in choice:
        return bool(choice["token_ids"])
    return bool(choice.get("text")) or not finished


def _shortfall(progress: _Progress, output_len: int) -> str | None:
    if not progress.finished:
        return "the stream ended before its finish_reason"
    if progress.num_output_tokens != output_len:
        return f"{progress.num_output_tokens} output tokens, {output_len} asked for"
    return None
