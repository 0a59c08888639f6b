"""`baton bench layouts` over a cluster that only says what it has moved."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf
from pathlib import Path
from typing import Any

import pytest

import cluster.bench.layouts
from cluster.bench.layout_formulas import Layout
from cluster.bench.layouts import LAYOUTS, LayoutBytes, run_layouts
from cluster.cli.bench_layouts import _json, _line
from cluster.spec.config import ParallelConfig
from cluster.spec.lifecycle import Role
from workers.traffic import HANDOFF, Traffic

PROMPT_LEN = 64
ONE_RANK = Layout("one", ParallelConfig())


class Counting:
    """A local cluster of two prefill ranks, without processes."""

    def __init__(self, moved: Traffic) -> None:
        self._moved, self._has_run = moved, False

    def load(self, config: Any, folder: Path) -> None:
        assert (config.model.path, folder.is_dir()) == (str(folder), True)

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def generate(self, prompts: Sequence[Any]) -> None:
        assert [len(prompt.token_ids) for prompt in prompts] == [PROMPT_LEN]
        self._has_run = True

    def ask(self, role: Role, what: str) -> list[Traffic]:
        assert what == "traffic"
        if role is Role.DECODE:
            return [Traffic()]
        before = Traffic({"attn_tp": 100, HANDOFF: 7})
        return [before + self._moved if self._has_run else before, Traffic()]

    def close(self) -> None:
        pass


def results(monkeypatch: pytest.MonkeyPatch, layout: Layout, **moved: int) -> list[LayoutBytes]:
    monkeypatch.setattr(cluster.bench.layouts, "LocalCluster", lambda: Counting(Traffic(moved)))
    return list(run_layouts(PROMPT_LEN, (layout,)))


def test_traffic_that_no_formula_knows_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    handoff, unexpected = results(monkeypatch, ONE_RANK, handoff=9, attn_cp=2048)
    assert (handoff.traffic, handoff.measured_bytes) == (HANDOFF, 9)
    assert unexpected == LayoutBytes(
        layout="one",
        side=Role.PREFILL,
        traffic="attn_cp",
        layers=1,
        measured_bytes=2048,
        expected_bytes=0,
        beside_bytes=0,
    )
    assert unexpected.difference == inf
    assert json.loads(_json(unexpected))["difference"] is None
    assert _line(unexpected).split() == ["one", "prefill", "attn_cp", "2.0", "0.0", "+inf%"]


def test_traffic_that_does_not_come_has_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    (layout,) = (layout for layout in LAYOUTS if layout.name == "tp=2 to tp=1")
    attn_tp, handoff = results(monkeypatch, layout)
    assert (attn_tp.traffic, attn_tp.measured_bytes, attn_tp.difference) == ("attn_tp", 0, -1)
    assert (handoff.traffic, handoff.measured_bytes, handoff.difference) == (HANDOFF, 0, -1)
