"""Names of traffic counters of one rank. No torch."""

from collections import Counter

Traffic = Counter[str]
"""Bytes by the name of a group of ranks, or one of the names below."""

WHOLE_SUM_BYTES = 128 << 10
"""Largest sum in shared memory that every rank adds up as a whole; for larger ones, reading costs more than waiting a
second time. Measured on two cores, for two ranks as for four.
"""

STAGES = "stages"
"""Hidden states from the stage before."""
HEAD_COPIES = "head_copies"
"""KV between decode ranks that hold the same heads."""
HANDOFF = "handoff"
"""KV written to decode."""
