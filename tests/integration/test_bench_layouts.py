"""`baton bench layouts`: what ranks move is what the formulas say, and a handoff never more than one copy of the KV."""

import json

import pytest

from cluster.bench.layouts import LAYOUTS, run_layouts
from cluster.cli.bench_layouts import _json
from cluster.spec.lifecycle import Role

SOME = ("cp=2 pass-KV cached", "cp=2 pass-Q cached", "tp=1 to tp=8", "cp=2 ep=2 sent")


@pytest.mark.integration
def test_measured_bytes_are_those_of_the_formulas() -> None:
    results = list(run_layouts(768, tuple(layout for layout in LAYOUTS if layout.name in SOME)))
    assert {(result.layout, result.side, result.traffic) for result in results} == {
        ("cp=2 pass-KV cached", Role.PREFILL, "attn_cp"),
        ("cp=2 pass-KV cached", Role.PREFILL, "handoff"),
        ("cp=2 pass-Q cached", Role.PREFILL, "attn_cp"),
        ("cp=2 pass-Q cached", Role.PREFILL, "handoff"),
        ("tp=1 to tp=8", Role.PREFILL, "handoff"),
        ("tp=1 to tp=8", Role.DECODE, "head_copies"),
        ("tp=1 to tp=8", Role.DECODE, "attn_tp"),
        ("cp=2 ep=2 sent", Role.PREFILL, "attn_cp"),
        ("cp=2 ep=2 sent", Role.PREFILL, "moe_block"),
        ("cp=2 ep=2 sent", Role.PREFILL, "handoff"),
    }
    assert all(abs(result.difference) < 0.05 for result in results)
    assert all(result.measured_bytes == result.expected_bytes for result in results if result.traffic == "handoff")
    assert json.loads(_json(results[0]))["side"] == "prefill"


@pytest.mark.integration
@pytest.mark.full
def test_measured_bytes_are_those_of_the_formulas_in_every_layout() -> None:
    results = list(run_layouts(1536))
    assert [result for result in results if abs(result.difference) >= 0.05] == []
    handoffs = {result.measured_bytes for result in results if result.traffic == "handoff"}
    pages = 1536 * 2 * 4 * 4 * 16 * 4
    assert handoffs == {pages, pages // 4}, "one copy, or that of the pages after a prefix"
