"""docs/metrics.md and the Grafana dashboard name exactly the metrics of `/metrics`, with their types and labels."""

import itertools
import json
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.channel import AsyncInbox
from cluster.spec.clock import SystemClock
from router.admission import Gate
from router.directory import Directory
from router.metrics import Metrics
from router.page_index import PageIndex
from router.state_metrics import StateMetrics
from tests import readme
from tests.fakes import dispatching

PAGE = (readme.ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def exposed() -> dict[str, str]:
    """Return the type of each metric family of an idle router, by name without the prefix."""
    metrics = Metrics()
    inbox = cast("AsyncInbox", SimpleNamespace(dropped=Counter()))
    parts = (dispatching.make(), Directory(grace_s=1.0), Gate(1, 1.0), PageIndex(1), SystemClock(), inbox)
    metrics.registry.register(StateMetrics(*parts))
    return {
        family.name.removeprefix("baton_") + ("_total" if family.type == "counter" else ""): family.type
        for family in metrics.registry.collect()
    }


def test_the_page_has_every_family_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE, re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a family has two rows"
    assert dict(rows) == exposed()


def test_metrics_in_the_text_exist() -> None:
    mentioned = set(re.findall(r"`(\w+_(?:total|seconds|perc|pages|running|waiting|bytes))`", PAGE))
    assert mentioned <= {*exposed(), "iteration_tokens_total"}


DASHBOARD = json.loads((readme.ROOT / "deploy" / "grafana" / "baton.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
OF_HISTOGRAMS = ("_bucket", "_sum", "_count")
LABELS = {
    name: set(re.findall(r"\w+", labels))
    for name, labels in re.findall(r"^\| `(\w+)` \| \w+ \| ([^|]*)\|", PAGE, re.MULTILINE)
}


def family_of(name: str) -> str:
    """Return the family of a time series."""
    families = exposed()
    if name in families:
        return name
    family = next(name.removesuffix(suffix) for suffix in OF_HISTOGRAMS if name.endswith(suffix))
    assert families[family] == "histogram"
    return family


@pytest.mark.parametrize("expression", EXPRESSIONS)
class TestExpressions:
    def test_counters_and_only_counters_are_queried_as_rates(self, expression: str) -> None:
        for is_rate, name in re.findall(r"(rate\()?baton_(\w+)\{", expression):
            assert bool(is_rate) == (exposed()[family_of(name)] != "gauge")

    def test_labels_are_there(self, expression: str) -> None:
        asked = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", expression)))) - {"le"}
        for name in re.findall(r"baton_(\w+)\{", expression):
            filtered = set(re.findall(r"(\w+)!?=", expression)) - {"job"}
            assert asked | filtered <= LABELS[family_of(name)] or "group_left" in expression

    def test_a_quantile_is_one_of_a_histogram(self, expression: str) -> None:
        assert ("histogram_quantile" in expression) == ("_bucket{" in expression) == ("(le" in expression)


def test_legends_name_labels_that_the_expression_keeps() -> None:
    for target in itertools.chain.from_iterable(panel["targets"] for panel in PANELS):
        named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", target["expr"]))))
        assert named <= kept, target


def test_panels_have_unique_ids_and_positions() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
    for one, other in itertools.combinations((panel["gridPos"] for panel in DASHBOARD["panels"]), 2):
        assert not _overlap(one, other), (one, other)


def _overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[at] < other[at] + other[size] and other[at] < one[at] + one[size] for at, size in ("xw", "yh"))
