"""Replay of a request trace: lengths, arrival times and common prefixes.

The format is that of the Mooncake traces (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces), JSON lines of
``timestamp`` in milliseconds, ``input_length``, ``output_length`` and ``hash_ids``: one id for each 512 tokens of the
prompt, equal where prompts are equal up to and including those tokens.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from cluster.bench.workload import VOCAB_SIZE, PlannedRequest, Workload, describe_limit
from cluster.spec.errors import UserError
from cluster.spec.kv import page_keys

BLOCK_LEN = 512
"""Tokens that one hash id stands for."""


class TraceEntry(msgspec.Struct, frozen=True):
    """One line of a trace."""

    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: list[int]


def trace_workload(
    entries: Sequence[TraceEntry],
    *,
    scale: float = 1.0,
    speed: float = 1.0,
    concurrency: int | None = None,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
) -> Workload:
    """Return the requests of a trace, with lengths multiplied by ``scale`` and arrival times divided by ``speed``.

    Raises:
        UserError: a value is not allowed.
    """
    if not entries:
        raise UserError("--trace: got no requests; allowed: 1 or more")
    for name, value in (("trace-scale", scale), ("trace-speed", speed)):
        if not 0 < value < float("inf"):
            raise UserError(f"--{name}: got {value}; allowed: a finite number greater than 0")
    block_len, first_ms = scaled_block_len(scale), entries[0].timestamp
    requests = [
        PlannedRequest(
            arrival_s=(entry.timestamp - first_ms) / 1000 / speed,
            input_len=max(1, entry.input_length * block_len // BLOCK_LEN),
            output_len=max(1, entry.output_length * block_len // BLOCK_LEN),
            block_len=block_len,
            block_seeds=tuple(f"block {seed} {hash_id}" for hash_id in entry.hash_ids),
            vocab_size=vocab_size,
        )
        for entry in entries
    ]
    lengths = f"lengths x {block_len / BLOCK_LEN:.3g}, speed x {speed:g}"
    return Workload(
        requests=requests,
        concurrency=concurrency,
        settings={"scale": scale, "speed": speed, "concurrency": concurrency, "seed": seed, "entries": len(entries)},
        title=f"{len(entries)} requests of a trace, {lengths}, {describe_limit(concurrency)}",
    )


def scaled_block_len(scale: float) -> int:
    """Return the tokens that one hash id becomes: a whole number, so that common prefixes stay common."""
    return max(1, round(BLOCK_LEN * scale))


def read_trace(path: Path, most: int | None = None) -> list[TraceEntry]:
    """Return the first entries of a trace file by time.

    Raises:
        UserError: the file cannot be read, or a line is not an entry.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    entries = [_entry(f"{path}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    return sorted(entries, key=lambda entry: entry.timestamp)[:most]


def infinite_cache_hits(prompts: Iterable[Sequence[int]], page_size: int) -> list[int]:
    """Return how many tokens of each prompt an unbounded cache would have, one prompt after another."""
    known: set[bytes] = set()
    hits: list[int] = []
    for prompt in prompts:
        keys = page_keys(prompt, page_size, "")
        # The last token of a prompt is always computed: its logits are needed.
        usable = (len(prompt) - 1) // page_size
        hits.append(page_size * next((page for page in range(usable) if keys[page] not in known), usable))
        known.update(keys)
    return hits


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
        raise UserError(f"{where}: got {given}; allowed: one id for each {BLOCK_LEN} tokens")
    return entry
