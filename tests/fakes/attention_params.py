"""Query parameters that a layer and a captured step pass to an attention backend."""

from torch import Tensor

from workers.attention.interface import AttentionParams, GraphShape
from workers.device import device_of


def params_for(query: Tensor, window: int | None = None) -> AttentionParams:
    """Return parameters with the usual scale."""
    return AttentionParams(query.shape[-1] ** -0.5, window)


def shape_for(
    query: Tensor, kv_heads: int, most_pages: int, page_size: int, value_dim: int | None = None
) -> GraphShape:
    """Return the sizes of captured steps for queries ``[requests, heads, D]``, with values of that width by default."""
    num_requests, num_heads, head_dim = query.shape
    return GraphShape(
        num_requests=num_requests,
        most_pages=most_pages,
        page_size=page_size,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim if value_dim is None else value_dim,
        dtype=query.dtype,
        device=device_of(query),
    )
