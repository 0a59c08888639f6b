"""The names of what one rank moves, for those that count it. No torch."""

from collections import Counter

Traffic = Counter[str]
"""Bytes by the name of a group of ranks, or one of these."""

STAGES = "stages"
"""Hidden states from the stage before."""
HANDOFF = "handoff"
"""KV written to decode."""
