"""Recording of one worker's work for traced requests. Costs almost nothing while none is traced."""

from collections import OrderedDict
from dataclasses import dataclass, field

from cluster.spec.clock import Interval
from cluster.spec.ids import Room
from cluster.spec.step_messages import StepPlan

REQUEST, COMPUTE, COLLECTIVES, KV_SENDER = "request", "compute", "collectives", "kv sender"
"""Names of lanes in the trace."""

MAX_ROOMS = 8
"""Most requests recorded at once; the oldest one that nobody asked for is replaced."""
MAX_INTERVALS = 20_000
"""Most intervals recorded per request."""


@dataclass(slots=True)
class Log:
    """Recorded intervals of one request."""

    intervals: list[Interval] = field(default_factory=list)
    num_left_out: int = 0
    state: str = ""
    """State of the request at the leader since ``since_s``; empty before and after."""
    since_s: float = 0.0

    def add(self, interval: Interval) -> None:
        """Record an interval, while there is room."""
        if len(self.intervals) < MAX_INTERVALS:
            self.intervals.append(interval)
        else:
            self.num_left_out += 1


class Recorder:
    """Logs of one worker, by room. The worker's thread calls everything; ``add`` also its KV sender's."""

    def __init__(self) -> None:
        self._logs: OrderedDict[Room, Log] = OrderedDict()
        self._current: list[Log] = []
        """Logs of the requests in the current step."""

    def trace(self, room: Room) -> None:
        """Record this request from now on."""
        self._logs.setdefault(room, Log())
        if len(self._logs) > MAX_ROOMS:
            self._logs.popitem(last=False)

    def begin(self, plan: StepPlan) -> bool:
        """Start a step and return whether a request in it is traced. Intervals belong to all of those until ``end``."""
        for admit in plan.admits:
            if admit.traced:
                self.trace(admit.room)
        self._current = [self._logs[row.room] for row in plan.scheduled if row.room in self._logs] if self._logs else []
        return bool(self._current)

    def note(self, interval: Interval) -> None:
        """Record an interval of the current step, if a request in it is traced."""
        for log in self._current:
            log.add(interval)

    def end(self) -> None:
        """End the step."""
        self._current = []

    def add(self, room: Room, interval: Interval) -> None:
        """Record an interval, if this request is traced."""
        if (log := self._logs.get(room)) is not None:
            log.add(interval)

    def enter(self, room: Room, state: str | None, now_s: float) -> None:
        """Record that the leader moves a request to a state, or is done with it; the time in the previous state is an
        interval.
        """
        if (log := self._logs.get(room)) is not None:
            if log.state:
                log.add(Interval(REQUEST, log.state, log.since_s, now_s))
            log.state, log.since_s = state or "", now_s

    def take(self, room: Room, now_s: float) -> Log:
        """Return the log of a request up to now, and forget it; empty if it was not traced."""
        self.enter(room, None, now_s)
        return self._logs.pop(room, None) or Log()
