"""Size of a rank's page pool, and the part of the model in it. Pure arithmetic."""

from collections.abc import Iterable

from cluster.spec.kv import GroupLayout, KvGeometry, KvGroup, PoolLayout
from cluster.spec.ranks import kv_heads_of, stage_layers
from cluster.spec.registry import RankCoords

GIB = 1 << 30


def pool_layout(geometry: KvGeometry, sizes: RankCoords, coords: RankCoords, memory_gib: float) -> PoolLayout:
    """Return the pool of one rank: its layers and heads, and the pages that fit into its memory besides the null page.

    Raises:
        ValueError: the heads cannot be divided over tp, a stage gets no layer, or the memory holds no page.
    """
    layout = page_layout(geometry, sizes, coords)
    page_bytes = layout.page_bytes
    num_pages = int(memory_gib * GIB) // page_bytes - 1
    if num_pages < 1:
        raise ValueError(
            f"{memory_gib} GiB hold no page besides the null page; one page takes {page_bytes} bytes, "
            f"so give at least {2 * page_bytes / GIB:.3g} GiB"
        )
    return PoolLayout(
        num_pages=num_pages,
        page_size=layout.page_size,
        first_layer=layout.first_layer,
        num_layers=layout.num_layers,
        groups=layout.groups,
        num_lifetimes=layout.num_lifetimes,
    )


def page_layout(geometry: KvGeometry, sizes: RankCoords, coords: RankCoords, num_pages: int = 1) -> PoolLayout:
    """Return the pool of one rank with a given number of pages.

    Raises:
        ValueError: the heads cannot be divided over tp, or a stage gets no layer with KV.
    """
    layers = stage_layers(geometry.num_layers, sizes.pp, coords.pp)
    groups = tuple(_group_layouts(geometry, sizes, coords, layers))
    if not groups:
        raise ValueError(f"{geometry.num_layers} layers cannot be divided over pp = {sizes.pp}; a stage needs one")
    return PoolLayout(
        num_pages=num_pages,
        page_size=geometry.page_size,
        first_layer=layers.start,
        num_layers=len(layers),
        groups=groups,
        num_lifetimes=len(geometry.lifetimes),
    )


def _group_layouts(geometry: KvGeometry, sizes: RankCoords, coords: RankCoords, stage: range) -> Iterable[GroupLayout]:
    for group in geometry.groups:
        heads = kv_heads_of(group.num_heads, sizes.tp, coords.tp)
        if layers := tuple(layer for layer in group.layers if layer in stage):
            yield _group_layout(geometry, group, heads, layers)


def _group_layout(geometry: KvGeometry, group: KvGroup, heads: range, layers: tuple[int, ...]) -> GroupLayout:
    return GroupLayout(
        name=group.name,
        first_head=heads.start,
        num_heads=len(heads),
        layers=layers,
        parts=group.parts,
        page_size=geometry.page_size,
        lifetime=geometry.lifetime_of(group),
    )
