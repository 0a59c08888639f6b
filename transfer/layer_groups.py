"""Early send: layer groups of a prompt's last pages that leave while later layers are computed. Pure arithmetic."""

from cluster.spec.kv import PoolLayout

MOST_GROUPS = 4
"""Maximum number of groups. The last group leaves when the step is over, so the end of a step waits for a quarter of
the bytes.
"""
LEAST_SPAN_BYTES = 64 << 10
"""Minimum span size; smaller spans would cost more than they hide."""


def early_ends(layout: PoolLayout, least_span_bytes: int = LEAST_SPAN_BYTES) -> list[int]:
    """Return after how many of a rank's layers the finished ones are sent; empty if all leave together."""
    least = -(-least_span_bytes // min(group.layer_bytes for group in layout.groups))
    size = max(least, -(-layout.num_layers // MOST_GROUPS))
    return list(range(size, layout.num_layers - least + 1, size))
