"""Runs: tokens at regular positions of one request, which determine causality. No torch, no I/O."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of one request, ``count`` in number, at positions first, first + step, ...; positions include the cached
    prefix.
    """

    request: int
    first_position: int
    count: int
    step: int

    @property
    def last_position(self) -> int:
        return self.first_position + (self.count - 1) * self.step


RankRuns = tuple[Run, ...]


def coalesce(runs: Iterable[Run]) -> RankRuns:
    """Drop empty runs, give single tokens step 1, and join a run with the one it continues."""
    joined: list[Run] = []
    for run in (Run(run.request, run.first_position, run.count, run.step if run.count > 1 else 1) for run in runs):
        if joined and _continues(run, joined[-1]):
            run = Run(run.request, joined[-1].first_position, joined.pop().count + run.count, 1)
        if run.count > 0:
            joined.append(run)
    return tuple(joined)


def sees_any(query_runs: Iterable[Run], key_runs: Iterable[Run]) -> bool:
    """Return whether any query is at or after the position of any key of its request."""
    latest: dict[int, int] = {}
    for run in query_runs:
        latest[run.request] = max(run.last_position, latest.get(run.request, -1))
    return any(run.count > 0 and run.first_position <= latest.get(run.request, -1) for run in key_runs)


def _continues(run: Run, last: Run) -> bool:
    adjacent = run.request == last.request and run.first_position == last.last_position + 1
    return adjacent and run.step == last.step == 1
