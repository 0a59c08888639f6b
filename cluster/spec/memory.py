"""Memory budgets of a rank's page pool, a GPU, and a worker on its host. Pure arithmetic."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from cluster.spec.kv import GroupLayout, KvGeometry, PoolLayout
from cluster.spec.ranks import kv_heads_of, stage_layers
from cluster.spec.registry import AxisSizes, RankCoords

GIB = 1 << 30
LIBRARIES_GIB = 1.0
"""Allowance for a process's CUDA libraries and graphs on a shared GPU, where they cannot be measured."""
STAGING_PIECE_BYTES = 64 << 20
"""Maximum size, a power of two, of a piece that a rank copies to shared memory. Larger messages are split."""
STAGING_SLOTS = 2
"""Number of pieces of a rank in shared memory. One is written while peers still read the other."""


def staging_slot_bytes(num_bytes: int, most: int = STAGING_PIECE_BYTES) -> int:
    """Return the bytes that a rank reserves for a message, or for a piece of it: a power of two, at most ``most``."""
    return min(1 << max(num_bytes - 1, 0).bit_length(), most)


def pool_layout(geometry: KvGeometry, sizes: AxisSizes, coords: RankCoords, memory_gib: float) -> PoolLayout:
    """Return the layout of one rank's pool: its layers and heads, and as many pages as fit next to the null page.

    Raises:
        ValueError: the heads cannot be divided over tp, a stage gets no layer, or the memory is too small for a page.
    """
    layout = page_layout(geometry, sizes, coords)
    page_bytes = layout.page_bytes
    num_pages = int(memory_gib * GIB) // page_bytes - 1
    if num_pages < 1:
        raise ValueError(
            f"{memory_gib} GiB cannot hold a page and the null page; each takes {page_bytes} bytes, "
            f"so set at least {2 * page_bytes / GIB:.3g} GiB"
        )
    return msgspec.structs.replace(layout, num_pages=num_pages)


def page_layout(geometry: KvGeometry, sizes: AxisSizes, coords: RankCoords, num_pages: int = 1) -> PoolLayout:
    """Return the layout of one rank's pool with a given number of pages.

    Raises:
        ValueError: the heads cannot be divided over tp, or a stage gets no layer with KV.
    """
    layers = stage_layers(geometry.num_layers, sizes.pp, coords.pp)
    groups = tuple(_group_layouts(geometry, sizes, coords, layers))
    if not groups:
        raise ValueError(f"{geometry.num_layers} layers cannot fill pp = {sizes.pp} stages; each needs at least one")
    return PoolLayout(
        num_pages=num_pages,
        page_size=geometry.page_size,
        first_layer=layers.start,
        num_layers=len(layers),
        groups=groups,
        num_lifetimes=len(geometry.lifetimes),
    )


def _group_layouts(geometry: KvGeometry, sizes: AxisSizes, coords: RankCoords, stage: range) -> Iterable[GroupLayout]:
    for group in geometry.groups:
        heads = kv_heads_of(group.num_heads, sizes.tp, coords.tp)
        if layers := tuple(layer for layer in group.layers if layer in stage):
            yield GroupLayout(
                name=group.name,
                first_head=heads.start,
                num_heads=len(heads),
                layers=layers,
                parts=group.parts,
                page_size=geometry.page_size,
                lifetime=geometry.lifetime_of(group),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Use of one worker's GPU memory, in GiB."""

    total: float
    """Memory of the GPU, or of the worker's part of it."""
    fraction: float
    """Value of ``kv.memory_fraction``."""
    weights: float
    activations: float
    graphs: float = 0.0
    """Memory of captured decode steps, without their inputs and outputs."""
    others: float = 0.0
    """Memory of libraries and other processes."""

    @property
    def left(self) -> float:
        """Memory left for the page pool; negative if the other uses do not fit."""
        return self.fraction * self.total - self.weights - self.activations - self.graphs - self.others

    def __str__(self) -> str:
        return (
            f"{self.fraction:g} of {self.total:.4g} GiB of GPU memory, less {self.weights:.3g} for weights, "
            f"{self.activations:.3g} for activations, {self.graphs:.3g} for CUDA graphs and {self.others:.3g} for "
            f"other uses, leaves {self.left:.3g} GiB"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Host memory of one worker in GiB, without the few hundred MiB of the process itself."""

    weights: float
    """Weights on a CPU; 0 on a GPU."""
    activations: float
    """Activations of the largest step on a CPU; 0 on a GPU."""
    pages: float
    """Page pool, or the staging buffer for a GPU's pages."""
    cached: float
    """Value of ``hicache.host_gib``."""
    in_transit: float
    """Buffers of a Mooncake Store client for objects in transit."""

    @property
    def total(self) -> float:
        return self.weights + self.activations + self.pages + self.cached + self.in_transit

    def __str__(self) -> str:
        parts = {
            "for weights": self.weights,
            "for activations": self.activations,
            "for pages": self.pages,
            "for cached pages": self.cached,
            "for data in transit to and from storage": self.in_transit,
        }
        return f"{self.total:.3g} GiB: " + ", ".join(f"{gib:.3g} {name}" for name, gib in parts.items() if gib)
