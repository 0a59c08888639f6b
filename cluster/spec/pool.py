"""How many pages fit into a worker's pool, and which part of the model is in them. Pure arithmetic."""

from cluster.spec.kv import DTYPE_BYTES, KvGeometry, PoolLayout
from cluster.spec.ranks import kv_heads_of, stage_layers
from cluster.spec.registry import RankCoords

GIB = 1 << 30


def pool_layout(geometry: KvGeometry, sizes: RankCoords, coords: RankCoords, memory_gib: float) -> PoolLayout:
    """The pool of one rank: its layers and heads, and the pages that fit into its memory beside the padding page.

    Raises:
        ValueError: the heads cannot be divided over tp, a stage gets no layer, or the memory holds no page.
    """
    heads = kv_heads_of(geometry.num_kv_heads, sizes.tp, coords.tp)
    layers = stage_layers(geometry.num_layers, sizes.pp, coords.pp)
    if not layers:
        raise ValueError(f"{geometry.num_layers} layers cannot be divided over pp = {sizes.pp}; a stage needs one")
    itemsize = DTYPE_BYTES[geometry.dtype]
    page_bytes = 2 * len(heads) * len(layers) * geometry.page_size * geometry.head_dim * itemsize
    num_pages = int(memory_gib * GIB) // page_bytes - 1
    if num_pages < 1:
        raise ValueError(
            f"{memory_gib} GiB hold no page beside the padding page; one page takes {page_bytes} bytes, "
            f"so give at least {2 * page_bytes / GIB:.3g} GiB"
        )
    return PoolLayout(
        num_pages=num_pages,
        first_head=heads.start,
        num_heads=len(heads),
        first_layer=layers.start,
        num_layers=len(layers),
        page_size=geometry.page_size,
        head_dim=geometry.head_dim,
        itemsize=itemsize,
    )
