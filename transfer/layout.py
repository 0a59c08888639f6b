"""Where things lie in one worker's page pool: byte offsets from page, head and layer numbers. Pure arithmetic."""

from cluster.spec.kv import PoolLayout


def heads(layout: PoolLayout) -> range:
    """The KV heads of the model that this pool holds."""
    return range(layout.first_head, layout.first_head + layout.num_heads)


def layers(layout: PoolLayout) -> range:
    """The layers of the model that this pool holds."""
    return range(layout.first_layer, layout.first_layer + layout.num_layers)


def intersect(a: range, b: range) -> range:
    """The numbers in both of two ranges of step 1; may be empty."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def offset(layout: PoolLayout, page: int, head: int, layer: int) -> int:
    """First byte of K and V of one (page, head, layer), counted from the start of the pool.

    Head and layer are numbers of the model, not of this rank's part of it.
    """
    assert head in heads(layout), f"head {head} is not among {heads(layout)}"
    assert layer in layers(layout), f"layer {layer} is not among {layers(layout)}"
    assert 0 <= page < layout.num_pages, f"page {page} is not among {layout.num_pages}"
    return (
        page * layout.page_bytes
        + (head - layout.first_head) * layout.head_bytes
        + (layer - layout.first_layer) * layout.layer_bytes
    )
