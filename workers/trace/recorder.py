"""What one worker did for the requests that are timed. Costs next to nothing while no request is."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.spec.ids import Room
from cluster.spec.step_messages import Admit, StepPlan
from cluster.spec.timeline import Interval

REQUEST, COMPUTE, COLLECTIVES, KV_SENDER = "request", "compute", "collectives", "kv sender"
"""Lanes."""

MAX_ROOMS = 8
"""Requests kept at once; the oldest one, which nobody asked for, makes room for the next."""
MAX_INTERVALS = 20_000
"""Kept of one request."""


@dataclass(slots=True)
class Log:
    """What was kept of one request."""

    intervals: list[Interval] = field(default_factory=list)
    num_left_out: int = 0
    state: str = ""
    """Where the leader has the request since ``since_s``; nothing before and after."""
    since_s: float = 0.0

    def add(self, interval: Interval) -> None:
        """Keep an interval, while there is room."""
        if len(self.intervals) < MAX_INTERVALS:
            self.intervals.append(interval)
        else:
            self.num_left_out += 1


class Recorder:
    """The logs of one worker, by room. The worker's thread calls everything; ``add`` also its KV sender's."""

    def __init__(self) -> None:
        self._logs: OrderedDict[Room, Log] = OrderedDict()
        self._current: list[Log] = []
        """Of the requests in the step at hand."""

    def follow(self, room: Room) -> None:
        """Keep a log of this request from now on."""
        self._logs.setdefault(room, Log())
        if len(self._logs) > MAX_ROOMS:
            self._logs.popitem(last=False)

    def begin(self, plan: StepPlan) -> bool:
        """A step begins; whether a request in it is timed. What is noted belongs to all of those until ``end``."""
        self._follow_admits(plan.admits)
        self._current = [self._logs[row.room] for row in plan.scheduled if row.room in self._logs] if self._logs else []
        return bool(self._current)

    def note(self, interval: Interval) -> None:
        """Something took time in the step at hand; kept if a request in it is timed."""
        for log in self._current:
            log.add(interval)

    def end(self) -> None:
        """The step is over."""
        self._current = []

    def add(self, room: Room, interval: Interval) -> None:
        """Keep an interval, if this request is timed."""
        if (log := self._logs.get(room)) is not None:
            log.add(interval)

    def enter(self, room: Room, state: str | None, now_s: float) -> None:
        """The leader moves a request to a state, or is done with it; the time in the state before is an interval."""
        if (log := self._logs.get(room)) is not None:
            if log.state:
                log.add(Interval(REQUEST, log.state, log.since_s, now_s))
            log.state, log.since_s = state or "", now_s

    def take(self, room: Room, now_s: float) -> Log:
        """What was kept of a request up to now, which is then forgotten; empty when it was not timed."""
        self.enter(room, None, now_s)
        return self._logs.pop(room, None) or Log()

    def _follow_admits(self, admits: Iterable[Admit]) -> None:
        for admit in admits:
            if admit.timed:
                self.follow(admit.room)
