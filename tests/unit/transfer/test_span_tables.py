"""Spans, receivers and early sends equal the committed tables, byte for byte.

The tables fix the results of the arithmetic. If signatures change, change only the adapters at the top of this file.
Write the tables again, on purpose, with ``python -m tests.unit.transfer.test_span_tables``.
"""

import hashlib
import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cluster.spec.kv import KvGeometry, PoolLayout
from cluster.spec.memory import GIB, pool_layout
from cluster.spec.registry import AxisSizes, RankCoords, RankRecord, TransferMode
from tests.fakes.kv import kv_geometry, make_spans
from tests.fakes.rank_records import make_record
from transfer.page_assignment import PagePair, early_ends, receivers

TABLES = Path(__file__).parents[2] / "data" / "span_tables.json"
SOURCE_PAGES, TARGET_PAGES = 40, 50


class Geometry(NamedTuple):
    """The KV of a whole model with K and V in every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    page_size: int


class Side(NamedTuple):
    """The tensor parallel ranks and pipeline stages of one replica."""

    tp: int
    pp: int = 1

    def __str__(self) -> str:
        return f"tp{self.tp}pp{self.pp}"

    @property
    def ranks(self) -> list["Rank"]:
        """Return every rank, with stages as the outermost axis."""
        return [Rank(tp, pp, self) for pp, tp in product(range(self.pp), range(self.tp))]


class Rank(NamedTuple):
    """One rank of a side."""

    tp: int
    pp: int
    side: Side


class Layers(NamedTuple):
    """Range of model layers without the last one. None means all following layers."""

    first: int = 0
    last: int | None = None


Span = tuple[int, int, int]


def spans_of(
    geometry: Geometry, source: Rank, target: Rank, pages: Iterable[tuple[int, int]], layers: Layers
) -> list[Span]:
    """Return source offset, target offset and bytes of each copy from one pool to another."""
    pools = (pool_of(geometry, source, SOURCE_PAGES), pool_of(geometry, target, TARGET_PAGES))
    spans = make_spans(*pools, (PagePair(0, *pair) for pair in pages), first_layer=layers.first, last_layer=layers.last)
    return [(span.source_offset, span.target_offset, span.num_bytes) for span in spans]


def receivers_of(geometry: Geometry, sender: Rank, cp_rank: int, mode: TransferMode, target: Side) -> list[int]:
    """Return the global ranks to which a sender, one of two CP ranks, sends."""
    coords, sizes = _coords(sender, cp=cp_rank), _sizes(sender.side, cp=2)
    return [record.global_rank for record in receivers(mode, coords, sizes, _records(geometry, target))]


def early_ends_of(geometry: Geometry, rank: Rank) -> list[int]:
    """Return after how many of its layers a rank sends KV early."""
    return list(early_ends(pool_of(geometry, rank, SOURCE_PAGES)))


def pool_of(geometry: Geometry, rank: Rank, num_pages: int) -> PoolLayout:
    arguments = _kv(geometry), _sizes(rank.side), _coords(rank)
    page_bytes = pool_layout(*arguments, 1.0).page_bytes
    return pool_layout(*arguments, (num_pages + 1.5) * page_bytes / GIB)


def _kv(geometry: Geometry) -> KvGeometry:
    return kv_geometry(model="golden", **geometry._asdict())


def _sizes(side: Side, cp: int = 1) -> AxisSizes:
    return AxisSizes(dp=1, cp=cp, tp=side.tp, pp=side.pp)


def _coords(rank: Rank, cp: int = 0) -> RankCoords:
    return RankCoords(dp=0, cp=cp, tp=rank.tp, pp=rank.pp)


def _records(geometry: Geometry, side: Side) -> list[RankRecord]:
    return [
        make_record("decode-0", at, _sizes(side), geometry=_kv(geometry), layout=pool_of(geometry, rank, TARGET_PAGES))
        for at, rank in enumerate(side.ranks)
    ]


# Nothing below depends on the product.

KV_HEADS, DTYPES = (1, 2, 8), ("float32", "bfloat16")
SOURCES = [Side(tp, pp) for tp, pp in product((1, 2, 4), (1, 2))]
TARGETS = [Side(tp, pp) for tp, pp in product((1, 2, 4, 8), (1, 2))]
PAGES: dict[str, list[tuple[int, int]]] = {
    "none": [],
    "one": [(3, 5)],
    "run": [(4, 7), (5, 8), (6, 9)],
    "gaps in the source": [(2, 7), (4, 8), (7, 9)],
    "gaps in the target": [(2, 0), (3, 2), (4, 3), (5, 9)],
    "scattered": [(30, 1), (2, 44), (17, 17), (0, 49), (39, 0)],
    "backwards": [(9, 9), (8, 8), (7, 7)],
}
LAYERS = [Layers(), Layers(0, 2), Layers(1, 3), Layers(2), Layers(3, 3), Layers(4, 5), Layers(7)]
HASHED = [*product(PAGES, LAYERS[:1]), *product(("run", "scattered"), LAYERS[1:])]
READABLE: list[tuple[Geometry, Side, Side, str, Layers]] = [
    (Geometry(3, heads, 4, "float32", 2), source, target, pages, layers)
    for heads, source, target, pages, layers in [
        (2, Side(1), Side(1), "run", Layers()),
        (2, Side(1), Side(1), "gaps in the target", Layers()),
        (2, Side(1), Side(1), "run", Layers(1, 2)),
        (2, Side(1), Side(2), "run", Layers()),
        (2, Side(2), Side(1), "run", Layers()),
        (1, Side(2), Side(4), "one", Layers()),
        (2, Side(1), Side(1, 2), "run", Layers()),
        (2, Side(2, 2), Side(1), "one", Layers(0, 2)),
    ]
]


def geometry_of(num_kv_heads: int, dtype: str = "float32") -> Geometry:
    """Return five layers, which two stages divide unequally."""
    return Geometry(num_layers=5, num_kv_heads=num_kv_heads, head_dim=16, dtype=dtype, page_size=16)


def span_hashes() -> dict[str, str]:
    """Return number of spans, bytes and a hash over all ranks, page lists and layer ranges of two sides."""
    return {
        f"{dtype} heads{heads} {source}->{target}": _span_hash(geometry_of(heads, dtype), source, target)
        for dtype, heads, source, target in product(DTYPES, KV_HEADS, SOURCES, TARGETS)
    }


def _span_hash(geometry: Geometry, source: Side, target: Side) -> str:
    tables = [
        spans_of(geometry, from_rank, to_rank, PAGES[pages], layers)
        for from_rank, to_rank, (pages, layers) in product(source.ranks, target.ranks, HASHED)
    ]
    num_bytes = sum(span[2] for table in tables for span in table)
    return f"{sum(map(len, tables))} spans, {num_bytes} bytes, {_hash(tables)}"


def _hash(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, separators=(",", ":")).encode(), digest_size=8).hexdigest()


def whole_tables() -> dict[str, list[list[int]]]:
    """Return every span of small cases, by source and target rank."""
    found = {}
    for geometry, source, target, pages, layers in READABLE:
        for sender, receiver in product(source.ranks, target.ranks):
            ranks = f"{source} tp{sender.tp}.pp{sender.pp} -> {target} tp{receiver.tp}.pp{receiver.pp}"
            name = f"heads{geometry.num_kv_heads} {ranks}, {pages}, layers {layers.first}:{layers.last or ''}"
            found[name] = [list(span) for span in spans_of(geometry, sender, receiver, PAGES[pages], layers)]
    return found


def receiver_tables() -> dict[str, list[list[int]]]:
    """Return the receivers of each sender. Within a stage, the CP ranks follow one another."""
    return {
        f"{mode} heads{heads} {source}->{target}": _receivers(geometry_of(heads), source, target, mode)
        for mode, heads, source, target in product(TransferMode, KV_HEADS, SOURCES, TARGETS)
        if mode is TransferMode.ALL_RANKS or target.tp == 2
    }


def _receivers(geometry: Geometry, source: Side, target: Side, mode: TransferMode) -> list[list[int]]:
    return [
        receivers_of(geometry, Rank(tp, pp, source), cp_rank, mode, target)
        for pp, cp_rank, tp in product(range(source.pp), range(2), range(source.tp))
    ]


def early_tables() -> dict[str, list[list[int]]]:
    models = {
        "tiny": Geometry(2, 2, 16, "float32", 16),
        "0.6B": Geometry(28, 8, 128, "bfloat16", 64),
        "8B": Geometry(36, 8, 128, "bfloat16", 64),
        "8B, small pages": Geometry(36, 8, 128, "bfloat16", 16),
        "8B, fp32": Geometry(36, 8, 128, "float32", 256),
        "70B": Geometry(80, 8, 128, "bfloat16", 64),
        "5 layers": Geometry(5, 1, 256, "float32", 64),
    }
    return {
        f"{name} {side}": [early_ends_of(geometry, Rank(0, pp, side)) for pp in range(side.pp)]
        for (name, geometry), side in product(models.items(), (Side(1), Side(8), Side(1, 2)))
    }


MAKERS: dict[str, Any] = {
    "hashes": span_hashes,
    "spans": whole_tables,
    "receivers": receiver_tables,
    "early ends": early_tables,
}


def write_tables() -> None:
    """Write one entry per line."""
    parts = []
    for name, make in MAKERS.items():
        lines = (f"  {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in make().items())
        parts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    TABLES.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


@pytest.mark.parametrize("name", MAKERS)
def test_tables_equal_the_committed_ones(name: str) -> None:
    expected = json.loads(TABLES.read_text(encoding="utf-8"))[name]
    found = MAKERS[name]()
    assert {key: value for key, value in found.items() if value != expected.get(key)} == {}
    assert list(found) == list(expected)


if __name__ == "__main__":
    write_tables()
