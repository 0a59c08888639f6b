"""KV geometries, layouts and pools of ordinary attention, from a few numbers."""

from collections.abc import Iterable

import torch
from torch import Tensor

from cluster.spec.kv import GroupLayout, KvGeometry, KvGroup, KvPart, PoolLayout, key_value_group
from transfer.page_assignment import PagePair
from transfer.page_range import PageRange, Span
from workers.memory.page_pool import PagePool

_DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def kv_geometry(
    *,
    num_layers: int = 1,
    num_kv_heads: int = 1,
    head_dim: int = 1,
    dtype: str = "float32",
    page_size: int = 4,
    model: str = "m",
) -> KvGeometry:
    """Return a model whose layers all store K and V of one width."""
    group = key_value_group(range(num_layers), num_kv_heads, head_dim, dtype)
    return KvGeometry(model=model, num_layers=num_layers, groups=(group,), page_size=page_size)


def kv_layout(
    *,
    num_pages: int,
    first_head: int = 0,
    num_heads: int = 1,
    first_layer: int = 0,
    num_layers: int = 1,
    page_size: int = 4,
    head_dim: int = 1,
    itemsize: int = 4,
) -> PoolLayout:
    """Return a rank's pool for such a model."""
    layers = range(first_layer, first_layer + num_layers)
    group = GroupLayout(
        name="full_attention",
        first_head=first_head,
        num_heads=num_heads,
        layers=tuple(layers),
        parts=key_value_group(layers, num_heads, head_dim, _DTYPES[itemsize]).parts,
        page_size=page_size,
    )
    return PoolLayout(
        num_pages=num_pages, page_size=page_size, first_layer=first_layer, num_layers=num_layers, groups=(group,)
    )


def kv_pool(
    num_pages: int,
    num_heads: int,
    num_layers: int,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    memory: torch.Tensor | None = None,
    device: torch.device | None = None,
    *,
    value_dim: int | None = None,
    is_latent: bool = False,
) -> PagePool:
    """Return a rank's pages for such a model. Without ``value_dim``, values are as wide as keys.

    With ``is_latent``, layers store a single part of width ``head_dim`` instead.
    """
    layers = range(num_layers)
    widths = {"k": head_dim, "v": head_dim if value_dim is None else value_dim}
    if is_latent:
        widths = {"latent": head_dim}
    shard = GroupLayout(
        name="full_attention",
        first_head=0,
        num_heads=num_heads,
        layers=tuple(layers),
        parts=tuple(KvPart(name=name, dim=dim, dtype=_NAMES[dtype]) for name, dim in widths.items()),
        page_size=page_size,
    )
    layout = PoolLayout(num_pages=num_pages, page_size=page_size, first_layer=0, num_layers=num_layers, groups=(shard,))
    return PagePool(layout, memory, device)


def side_by_side(kv: torch.Tensor) -> torch.Tensor:
    """Return ``kv [tokens, 2, heads, dim]`` as the pool stores it, ``[tokens, heads, 2 * dim]``."""
    return kv.transpose(1, 2).flatten(2)


def make_spans(
    source: PoolLayout,
    target: PoolLayout,
    pairs: Iterable[PagePair],
    first_layer: int = 0,
    last_layer: int | None = None,
) -> list[Span]:
    """Return the spans that copy layers of pages with the first lifetime."""
    pairs = list(pairs)
    layers = range(first_layer, source.layers.stop if last_layer is None else last_layer)
    pages = PageRange(source, [pair.source for pair in pairs], layers)
    return pages.spans_to(PageRange(target, [pair.target for pair in pairs]))


def two_groups(num_layers: int = 4, num_heads: int = 2, page_size: int = 4) -> KvGeometry:
    """Return a model with K and V in every layer and one head with two unequal parts in every second one."""
    parts = (KvPart(name="latent", dim=6, dtype="bfloat16"), KvPart(name="keys", dim=2, dtype="float32"))
    extra = KvGroup(name="extra", num_heads=1, layers=tuple(range(1, num_layers, 2)), parts=parts)
    groups = (key_value_group(range(num_layers), num_heads, 4, "float32"), extra)
    return KvGeometry(model="two-groups", num_layers=num_layers, groups=groups, page_size=page_size)


def store_kv(layer_pages: Tensor, slots: Tensor, kv: Tensor) -> None:
    """Write rows ``kv [N, 2, H, D]`` like ``ElementwiseKernels.store_kv``, with plain torch."""
    page_size = layer_pages.shape[3]
    layer_pages.permute(0, 3, 2, 1, 4)[slots // page_size, slots % page_size] = kv
