"""Counters and histograms write what Prometheus' own would."""

from collections.abc import Sequence

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from router.metrics import Count, Histogram

_BOUNDS = (0.5, 1, 10)
_VALUES = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([0, 0.5, 0.75, 1, 2.25, 10, 11, 1e9])))


def _lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


class _Own(Collector):
    def __init__(self, *measures: Count | Histogram) -> None:
        self._measures = measures

    def collect(self) -> list[Metric]:
        return [measure.family() for measure in self._measures]


@given(_VALUES)
def test_as_prometheus_has_it(values: Sequence[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    count, spread = Count("sums", "Help.", "name"), Histogram("spans", "More help.", _BOUNDS, "name")
    ours.register(_Own(count, spread))
    their_count = prometheus_client.Counter("sums", "Help.", ["name"], registry=theirs)
    their_spread = prometheus_client.Histogram("spans", "More help.", ["name"], buckets=_BOUNDS, registry=theirs)
    for name, value in values:
        count.add(value, name)
        spread.note(value, name)
        their_count.labels(name).inc(value)
        their_spread.labels(name).observe(value)
    assert _lines(ours) == _lines(theirs)


def test_without_labels_there_is_a_line_before_anything_happens() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    ours.register(_Own(Count("sums", "Help."), Histogram("spans", "More help.", _BOUNDS)))
    prometheus_client.Counter("sums", "Help.", registry=theirs)
    prometheus_client.Histogram("spans", "More help.", buckets=_BOUNDS, registry=theirs)
    assert _lines(ours) == _lines(theirs)
