"""Counters and histograms write what Prometheus' own would."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from router.metrics import Measures

_BOUNDS = (0.5, 1, 10)
_VALUES = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([0, 0.5, 0.75, 1, 2.25, 10, 11, 1e9])))


def _lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(_VALUES)
def test_as_prometheus_has_it(values: Sequence[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    measures = Measures()
    ours.register(measures)
    count, spread = measures.count("sums", "Help.", "name"), measures.histogram("spans", "More help.", _BOUNDS, "name")
    their_count = Counter("baton_sums", "Help.", ["name"], registry=theirs)
    their_spread = Histogram("baton_spans", "More help.", ["name"], buckets=_BOUNDS, registry=theirs)
    for name, value in values:
        count.add(value, name)
        spread.note(value, name)
        their_count.labels(name).inc(value)
        their_spread.labels(name).observe(value)
    assert _lines(ours) == _lines(theirs)


def test_without_labels_there_is_a_line_before_anything_happens() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    measures = Measures()
    ours.register(measures)
    measures.count("sums", "Help.")
    measures.histogram("spans", "More help.", _BOUNDS)
    Counter("baton_sums", "Help.", registry=theirs)
    Histogram("baton_spans", "More help.", buckets=_BOUNDS, registry=theirs)
    assert _lines(ours) == _lines(theirs)
