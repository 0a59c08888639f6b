"""Counters and histograms that cost little to write, many times a token; Prometheus' own lock for every number."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]


class Count:
    """What only grows, for every combination of labels apart."""

    def __init__(self, name: str, help_text: str, *labels: str) -> None:
        self.name = name
        self._help_text = help_text
        self._labels = labels
        self.values: dict[Labels, float] = {} if labels else {(): 0}

    def add(self, amount: float, *labels: str) -> None:
        """So much more."""
        self.values[labels] = self.values.get(labels, 0) + amount

    def family(self) -> Metric:
        """As Prometheus writes it."""
        family = CounterMetricFamily(self.name, self._help_text, labels=self._labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return family


class Spread:
    """How values are spread over ranges, for every combination of labels apart."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float], *labels: str) -> None:
        """``bounds`` are the largest values of all ranges but the last, which has none."""
        self.name = name
        self._help_text = help_text
        self._labels = labels
        self._bounds = [*bounds]
        self.values: dict[Labels, list[float]] = {}
        """How many were in each range, and the sum of all."""
        if not labels:
            self.values[()] = self._nothing()

    def note(self, value: float, *labels: str) -> None:
        """One more value."""
        line = self.values.get(labels)
        if line is None:
            line = self.values[labels] = self._nothing()
        line[bisect_left(self._bounds, value)] += 1
        line[-1] += value

    def family(self) -> Metric:
        """As Prometheus writes it."""
        family = HistogramMetricFamily(self.name, self._help_text, labels=self._labels)
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, (*counts, total) in self.values.items():
            family.add_metric(labels, [*zip(ends, accumulate(counts), strict=True)], total)
        return family

    def _nothing(self) -> list[float]:
        return [0] * (len(self._bounds) + 2)


class Measures(Collector):
    """All of one process, for a registry."""

    def __init__(self) -> None:
        self._all: list[Count | Spread] = []

    def count(self, name: str, help_text: str, *labels: str) -> Count:
        """A new counter."""
        self._all.append(made := Count(name, help_text, *labels))
        return made

    def spread(self, name: str, help_text: str, bounds: Sequence[float], *labels: str) -> Spread:
        """A new histogram."""
        self._all.append(made := Spread(name, help_text, bounds, *labels))
        return made

    def describe(self) -> Iterable[Metric]:
        """Called by the registry: that none has the name of another is not its business."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        return (measure.family() for measure in self._all)
