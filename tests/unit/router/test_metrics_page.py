"""docs/metrics.md, the dashboard, alerts and scaling name the metrics of `/metrics`, with their types and labels."""

import itertools
import json
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from cluster.channel import AsyncInbox
from cluster.spec.clock import SystemClock
from router.admission import Gate
from router.directory import Directory
from router.metrics import Metrics
from router.page_index import PageIndex
from router.state_metrics import ReplicaMetrics, StateMetrics
from tests import manifests, readme
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
        for family in (*metrics.registry.collect(), *ReplicaMetrics(None).collect())
    }


def test_the_page_has_every_family_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE, re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a family has two rows"
    assert dict(rows) == exposed()


def test_metrics_in_the_text_exist() -> None:
    mentioned = set(re.findall(r"`(\w+_(?:total|seconds|perc|pages|running|waiting|bytes))`", PAGE))
    assert mentioned <= {*exposed(), "iteration_tokens_total"}


DASHBOARD = json.loads((manifests.MONITORING / "baton.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = yaml.safe_load((manifests.MONITORING / "alerts.yaml").read_text(encoding="utf-8"))
ALERTS = {rule["alert"]: rule for group in RULES["spec"]["groups"] for rule in group["rules"]}
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
EXPRESSIONS += [rule["expr"] for rule in ALERTS.values()]
EXPRESSIONS += [
    trigger["metadata"]["query"]
    for job in manifests.of_kind("ScaledJob", manifests.overlay(manifests.SCALED))
    for trigger in job["spec"]["triggers"]
]
OF_HISTOGRAMS = ("_bucket", "_sum", "_count")
ROWS = {
    name: (set(re.findall(r"\w+", labels)), set(re.findall(r"`(\w+)`", description)))
    for name, labels, description in re.findall(r"^\| `(\w+)` \| \w+ \| ([^|]*)\|(.*)\|$", PAGE, re.MULTILINE)
}
"""Labels and the words in backticks of each family's row."""


def family_of(name: str) -> str:
    """Return the family of a time series."""
    families = exposed()
    if name in families:
        return name
    family = next(name.removesuffix(suffix) for suffix in OF_HISTOGRAMS if name.endswith(suffix))
    assert families[family] == "histogram"
    return family


def series_in(expression: str) -> list[str]:
    return re.findall(r"baton_(\w+)", expression)


def kept_by(expression: str) -> set[str]:
    """Return the labels that aggregations keep."""
    return set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", expression))))


@pytest.mark.parametrize("expression", EXPRESSIONS)
class TestExpressions:
    def test_it_has_metrics_and_its_parentheses_match(self, expression: str) -> None:
        assert series_in(expression)
        assert all(expression.count(one) == expression.count(other) for one, other in ("()", "[]", "{}"))

    def test_counters_and_only_counters_are_queried_as_changes(self, expression: str) -> None:
        # A series that has just begun counts whole.
        rest = re.sub(r"baton_(\w+)(\{[^}]*\}) unless baton_\1\2 offset \w+", "", expression)
        for change, name in re.findall(r"((?:rate|increase|resets)\()?baton_(\w+)", rest):
            assert bool(change) == (exposed()[family_of(name)] != "gauge")

    def test_labels_are_there(self, expression: str) -> None:
        asked = kept_by(expression) - {"le", "job"}
        for name, selector in re.findall(r"baton_(\w+)(?:\{([^}]*)\})?", expression):
            labels, _ = ROWS[family_of(name)]
            assert set(re.findall(r"(\w+)[!=]", selector)) - {"job"} <= labels
            assert asked <= labels or "group_left" in expression

    def test_values_of_labels_are_documented(self, expression: str) -> None:
        for name, selector in re.findall(r"baton_(\w+)\{([^}]*)\}", expression):
            _, documented = ROWS[family_of(name)]
            for label, value in re.findall(r'(\w+)!?=~?"([^"]*)"', selector):
                assert label in {"job", "status"} or set(value.split("|")) <= documented

    def test_a_quantile_is_one_of_a_histogram(self, expression: str) -> None:
        assert ("_bucket" in expression) == ("le" in kept_by(expression))
        assert "histogram_quantile" not in expression or "_bucket" in expression


def test_legends_name_labels_that_the_expression_keeps() -> None:
    for target in itertools.chain.from_iterable(panel["targets"] for panel in PANELS):
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept_by(target["expr"]), target


def test_only_a_heatmap_shows_buckets() -> None:
    for panel in PANELS:
        raw = ["_bucket" in target["expr"] and "quantile" not in target["expr"] for target in panel["targets"]]
        assert raw == [panel["type"] == "heatmap"] * len(raw), panel["title"]


def test_numbers_of_the_whole_cluster_are_at_the_top() -> None:
    top = [panel for panel in PANELS if panel["gridPos"]["y"] == 0]
    assert {panel["type"] for panel in top} == {"stat"}
    assert sum(panel["gridPos"]["w"] for panel in top) == 24
    shown = {family_of(name) for panel in top for target in panel["targets"] for name in series_in(target["expr"])}
    assert shown >= {"ready_replicas", "num_requests_running", "num_requests_waiting", "generation_tokens_total"}
    assert shown >= {"request_ended_total", "time_to_first_token_seconds"}


def test_the_panel_of_phases_shows_all_up_to_the_first_token() -> None:
    (panel,) = [panel for panel in PANELS if panel["title"] == "Mean of each phase"]
    shown = {family_of(name) for target in panel["targets"] for name in series_in(target["expr"])}
    phases = {name for name in exposed() if re.fullmatch(r"request_\w+_time_seconds", name)}
    parts_and_sums = {f"request_{name}_time_seconds" for name in ("prefill_queue", "communication", "inference")}
    assert shown == phases - parts_and_sums - {"request_decode_time_seconds"}


def test_panels_have_unique_ids_and_positions() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
    for one, other in itertools.combinations((panel["gridPos"] for panel in DASHBOARD["panels"]), 2):
        assert not _overlap(one, other), (one, other)


def _overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[at] < other[at] + other[size] and other[at] < one[at] + one[size] for at, size in ("xw", "yh"))


@pytest.mark.parametrize("name", ALERTS)
class TestAlerts:
    def test_it_says_what_is_wrong_and_what_to_do(self, name: str) -> None:
        rule = ALERTS[name]
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert all(text.endswith(".") for text in rule["annotations"].values())

    def test_it_names_labels_that_its_expression_keeps(self, name: str) -> None:
        text = " ".join(ALERTS[name]["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= kept_by(ALERTS[name]["expr"])

    def test_it_compares_unless_it_looks_for_what_is_missing(self, name: str) -> None:
        expression = re.sub(r"\{[^}]*\}", "", ALERTS[name]["expr"])
        assert bool(re.search(r"[<>]|==", expression)) != expression.startswith("absent(")


def test_alerts_cover_what_an_operator_must_know() -> None:
    assert sum(len(group["rules"]) for group in RULES["spec"]["groups"]) == len(ALERTS), "two alerts have one name"
    watched = {family_of(name) for rule in ALERTS.values() for name in series_in(rule["expr"])}
    assert watched >= {
        "ready_replicas",
        "request_ended_total",
        "request_refused_total",
        "time_to_first_token_seconds",
        "admission_rejections_total",
        "rank_steps_total",
        "kv_cache_usage_perc",
        "tier_failures_total",
        "wrong_pages_total",
        "corrupted_requests_total",
        "breaker_state",
    }
