"""The names of what one rank moves, for those that count it. No torch."""

from collections import Counter

Traffic = Counter[str]
"""Bytes by the name of a group of ranks, or one of these."""

WHOLE_SUM_BYTES = 128 << 10
"""In shared memory every rank adds up all of a sum up to here for itself; beyond, bytes read cost more than waiting a
second time. `docs/benchmarks/2026-11-22-layouts.md` has the times, for two ranks and for four."""

STAGES = "stages"
"""Hidden states from the stage before."""
HEAD_COPIES = "head_copies"
"""KV between decode ranks that hold the same heads."""
HANDOFF = "handoff"
"""KV written to decode."""
