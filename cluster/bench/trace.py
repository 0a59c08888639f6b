"""Replays a trace of requests: lengths, arrival times, and which prompts begin alike.

The format is that of the Mooncake traces (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces), JSON lines of
``timestamp`` in milliseconds, ``input_length``, ``output_length``, and ``hash_ids``: one id for each 512 tokens of the
prompt, equal where prompts are equal up to and including them.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cluster.bench.workload import FIRST_TOKEN_ID, PlannedRequest, check_least, describe_limit, random_tokens
from cluster.spec.errors import UserError
from cluster.spec.page_key import page_keys

BLOCK_LEN = 512
"""Tokens that one hash id stands for."""


class TraceEntry(msgspec.Struct, frozen=True):
    """One line of a trace."""

    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """One replay. Raises UserError when a value makes no sense."""

    entries: Sequence[TraceEntry]
    """In order of time."""
    scale: float = 1.0
    """Prompts and answers are so many times as long, as exactly as a whole number of tokens a block allows."""
    speed: float = 1.0
    """Requests arrive so many times as fast."""
    concurrency: int | None = None
    """Most requests open at once; None for no limit."""
    vocab_size: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        check_least("requests of the trace", len(self.entries), 1)
        check_least("--vocab-size", self.vocab_size, FIRST_TOKEN_ID + 1)
        if self.concurrency is not None:
            check_least("--concurrency", self.concurrency, 1)
        for name, value in (("trace-scale", self.scale), ("trace-speed", self.speed)):
            if not 0 < value < float("inf"):
                raise UserError(f"--{name}: got {value}; allowed: more than 0")

    @property
    def block_len(self) -> int:
        """Tokens that one hash id becomes."""
        return max(1, round(BLOCK_LEN * self.scale))

    def requests(self) -> list[PlannedRequest]:
        """In order of arrival, the first one at once."""
        first_ms = self.entries[0].timestamp
        return [self._request(entry, (entry.timestamp - first_ms) / 1000 / self.speed) for entry in self.entries]

    def warmup(self, count: int) -> list[PlannedRequest]:
        """One block each, of ids that no trace has."""
        entries = [TraceEntry(0, BLOCK_LEN, BLOCK_LEN, [-1 - index]) for index in range(count)]
        return [self._request(entry, 0.0) for entry in entries]

    def settings(self) -> dict[str, Any]:
        """Every field, of the entries only how many."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"entries": len(self.entries)}

    def describe(self) -> str:
        """How many, how long, how fast."""
        lengths, times = f"lengths x {self.block_len / BLOCK_LEN:.3g}", f"{self.speed:g} times as fast"
        return f"{len(self.entries)} requests of a trace, {lengths}, {times}, {describe_limit(self.concurrency)}"

    def _request(self, entry: TraceEntry, arrival_s: float) -> PlannedRequest:
        return PlannedRequest(
            arrival_s=arrival_s,
            output_len=max(1, entry.output_length * self.block_len // BLOCK_LEN),
            make_prompt=lambda: self._prompt(entry),
        )

    def _prompt(self, entry: TraceEntry) -> list[int]:
        blocks = (
            random_tokens(f"block {self.seed} {hash_id}", self.vocab_size, self.block_len) for hash_id in entry.hash_ids
        )
        tokens = [token for block in blocks for token in block]
        return tokens[: max(1, entry.input_length * self.block_len // BLOCK_LEN)]


def read_trace(path: Path, most: int | None = None) -> list[TraceEntry]:
    """The first entries of a trace file, by time.

    Raises:
        UserError: it cannot be read, or a line is not one of a trace; names it.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    entries = [_entry(f"{path}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    return sorted(entries, key=lambda entry: entry.timestamp)[:most]


class EndlessCache:
    """Whole pages that are never forgotten."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._known: set[bytes] = set()

    def take(self, tokens: Sequence[int]) -> int:
        """How many tokens of a prompt it has, and has all of it from now on.

        The last token of a prompt is always computed, because its logits are needed.
        """
        keys = page_keys(tokens, self._page_size, "")
        usable = (len(tokens) - 1) // self._page_size
        num_known = next((page for page in range(usable) if keys[page] not in self._known), usable)
        self._known.update(keys)
        return self._page_size * num_known


def infinite_cache_hits(prompts: Iterable[Sequence[int]], page_size: int) -> list[int]:
    """How many tokens of each prompt an endless cache would have, one prompt after another."""
    cache = EndlessCache(page_size)
    return [cache.take(prompt) for prompt in prompts]


def _entry(where: str, line: bytes) -> TraceEntry:
    try:
        entry = msgspec.json.decode(line, type=TraceEntry)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{where}: {error}") from error
    if entry.input_length < 1 or entry.output_length < 0:
        given = f"input_length {entry.input_length} and output_length {entry.output_length}"
        raise UserError(f"{where}: got {given}; allowed: 1 or more, and 0 or more")
    if len(entry.hash_ids) * BLOCK_LEN < entry.input_length:
        given = f"{entry.input_length} tokens and {len(entry.hash_ids)} hash_ids"
        raise UserError(f"{where}: got {given}; one id is needed for each {BLOCK_LEN} tokens")
    return entry
