"""The layers of a prompt's last pages that leave while later ones are computed. Pure arithmetic."""

from cluster.spec.kv import PoolLayout

MOST_GROUPS = 4
"""The last one leaves when the step is over: a quarter is what a step's end waits for."""
LEAST_SPAN_BYTES = 64 << 10
"""Smaller pieces would cost more than they hide."""


def early_ends(layout: PoolLayout, least_span_bytes: int = LEAST_SPAN_BYTES) -> list[int]:
    """Return the layer counts after which the layers stored so far leave; empty where all must leave together."""
    least = -(-least_span_bytes // layout.layer_bytes)
    size = max(least, -(-layout.num_layers // MOST_GROUPS))
    return list(range(size, layout.num_layers - least + 1, size))
