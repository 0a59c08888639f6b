"""`baton bench layouts`: what ranks move is what the formulas say, and a handoff each head once a holder."""

import json

import pytest

from cluster.bench.layouts import LAYOUTS, run_layouts
from cluster.cli.bench_layouts import _json

SOME = "cp=2 ep=2"


@pytest.mark.integration
def test_measured_bytes_are_those_of_the_formulas() -> None:
    results = list(run_layouts(768, tuple(layout for layout in LAYOUTS if layout.name == SOME)))
    assert [(result.layout, result.traffic) for result in results] == [
        (SOME, "attn_cp"),
        (SOME, "moe_shards"),
        (SOME, "handoff"),
    ]
    assert all(abs(result.difference) < 0.05 for result in results)
    assert all(result.measured_bytes == result.expected_bytes for result in results if result.traffic == "handoff")
    assert json.loads(_json(results[0]))["layout"] == SOME


@pytest.mark.integration
@pytest.mark.full
def test_measured_bytes_are_those_of_the_formulas_in_every_layout() -> None:
    assert all(abs(result.difference) < 0.05 for result in run_layouts(1536))
