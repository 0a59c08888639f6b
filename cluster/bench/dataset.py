"""Files with the requests of a benchmark: a Mooncake trace, prompts as JSON lines, or ShareGPT conversations.

A trace (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces) has JSON lines with a ``timestamp`` in
milliseconds, ``input_length``, ``output_length`` and ``hash_ids``. Prompts are JSON lines with a ``prompt`` and, if
wanted, an ``output_len``. ShareGPT is one JSON array of conversations.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from cluster.bench.workload import BLOCK_LEN, TraceEntry
from cluster.spec.errors import UserError

T = TypeVar("T")
_START = 1 << 16
"""Number of bytes that show what kind of file it is."""


class PromptEntry(msgspec.Struct, frozen=True):
    """Request with a text."""

    prompt: Annotated[str, msgspec.Meta(min_length=1)]
    output_len: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Number of tokens of the answer; None if the file has none."""
    answer: str = ""
    """Answer in the file. Its length replaces a missing ``output_len``."""


class _Turn(msgspec.Struct, frozen=True):
    speaker: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct, frozen=True):
    conversations: list[_Turn] = []


def read_dataset(path: Path, most: int | None = None) -> list[TraceEntry] | list[PromptEntry]:
    """Return the requests of a file; with ``most``, only the first ones.

    Raises:
        UserError: the file cannot be read, has no requests, or has an invalid line.
    """
    try:
        with path.open("rb") as file:
            start = file.read(_START).lstrip()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if start.startswith(b"["):
        return _some(path, _read_conversations(path)[:most])
    if b'"hash_ids"' in start.partition(b"\n")[0]:
        return read_trace(path, most)
    return _some(path, _read_lines(path, lambda line, _: msgspec.json.decode(line, type=PromptEntry))[:most])


def read_trace(path: Path, most: int | None = None) -> list[TraceEntry]:
    """Return the entries of a trace file, sorted by time; with ``most``, only that many of the earliest.

    Raises:
        UserError: the file cannot be read, is empty, or has an invalid line.
    """
    return sorted(_some(path, _read_lines(path, _trace_entry)), key=lambda entry: entry.timestamp)[:most]


def _read_conversations(path: Path) -> list[PromptEntry]:
    """Return the first turn of each conversation, with its answer. Conversations without both are left out."""
    try:
        conversations = msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: {error}; allowed: ShareGPT conversations, or JSON lines") from error
    turns = [conversation.conversations[:2] for conversation in conversations]
    return [
        PromptEntry(question.value, answer=answer.value)
        for question, answer in (pair for pair in turns if len(pair) == 2)
        if question.speaker in ("human", "user") and question.value and answer.value
    ]


def _read_lines(path: Path, decode: Callable[[bytes, str], T]) -> list[T]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    entries = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                entries.append(decode(line, where))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise UserError(f"{where}: {error}") from error
    return entries


def _trace_entry(line: bytes, where: str) -> TraceEntry:
    entry = msgspec.json.decode(line, type=TraceEntry)
    if entry.input_length < 1 or entry.output_length < 0:
        given = f"input_length {entry.input_length} and output_length {entry.output_length}"
        raise UserError(f"{where}: got {given}; allowed: input_length of 1 or more, output_length of 0 or more")
    if len(entry.hash_ids) * BLOCK_LEN < entry.input_length:
        given = f"{entry.input_length} tokens and {len(entry.hash_ids)} hash_ids"
        raise UserError(f"{where}: got {given}; allowed: at least one id for every {BLOCK_LEN} tokens")
    return entry


def _some(path: Path, entries: list[T]) -> list[T]:
    if not entries:
        raise UserError(f"{path}: got no requests; allowed: 1 or more")
    return entries
