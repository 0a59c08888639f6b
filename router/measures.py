"""Counters and histograms that cost little to write, many times a token; Prometheus' own lock for every number."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]
Told = dict[str, dict[Labels, list[float]]]
"""By name and labels, the numbers of every measure of one process."""


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

    def told(self) -> dict[Labels, list[float]]:
        """All numbers."""
        return {labels: [value] for labels, value in self.values.items()}

    def family(self, told: Mapping[Labels, Sequence[float]]) -> Metric:
        """Such numbers as Prometheus writes them."""
        family = CounterMetricFamily(self.name, self._help_text, labels=self._labels)
        for labels, (value,) in told.items():
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
        self._plain = self._nothing()
        """That of no labels, which most have."""
        if not labels:
            self.values[()] = self._plain

    def note(self, value: float, *labels: str) -> None:
        """One more value."""
        line = self._plain if not labels else self._line(*labels)
        line[bisect_left(self._bounds, value)] += 1
        line[-1] += value

    def told(self) -> dict[Labels, list[float]]:
        """All numbers."""
        return self.values

    def _line(self, *labels: str) -> list[float]:
        if labels not in self.values:
            self.values[labels] = self._nothing()
        return self.values[labels]

    def family(self, told: Mapping[Labels, Sequence[float]]) -> Metric:
        """Such numbers as Prometheus writes them."""
        family = HistogramMetricFamily(self.name, self._help_text, labels=self._labels)
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, (*counts, whole) in told.items():
            family.add_metric(labels, [*zip(ends, accumulate(counts), strict=True)], whole)
        return family

    def _nothing(self) -> list[float]:
        return [0] * (len(self._bounds) + 2)


class Measures(Collector):
    """All of one process, for a registry, which also shows those of others."""

    def __init__(self) -> None:
        self._all: list[Count | Spread] = []
        self.others: Callable[[], Iterable[Told]] = tuple
        """What other processes have told of theirs."""

    def told(self) -> Told:
        """Everything here."""
        return {measure.name: measure.told() for measure in self._all}

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
        told = total([self.told(), *self.others()])
        return (measure.family(told[measure.name]) for measure in self._all)


def total(parts: Iterable[Told]) -> Told:
    """What several processes have measured together."""
    sums: Told = {}
    for part in parts:
        for name, lines in part.items():
            ours = sums.setdefault(name, {})
            for labels, numbers in lines.items():
                before = ours.get(labels)
                ours[labels] = numbers if before is None else [*map(sum, zip(before, numbers, strict=True))]
    return sums
