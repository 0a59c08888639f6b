"""Trace of one worker: intervals of traced requests. Recording costs almost nothing while no request is traced."""

from collections import OrderedDict
from dataclasses import dataclass, field

from cluster.spec.clock import Interval
from cluster.spec.ids import Room
from cluster.spec.step_messages import StepPlan

REQUEST, COMPUTE, COLLECTIVES, KV_SENDER = "request", "compute", "collectives", "kv sender"
"""Names of the tracks in a trace."""

MAX_ROOMS = 8
"""Maximum number of logs. A new log replaces the oldest one."""
MAX_INTERVALS = 20_000
"""Maximum number of recorded intervals per request."""


@dataclass(slots=True)
class Log:
    """Recorded intervals of one request."""

    intervals: list[Interval] = field(default_factory=list)
    num_left_out: int = 0
    state: str = ""
    """State of the request at the leader since ``since_s``. Empty before the first and after the last state."""
    since_s: float = 0.0

    def add(self, interval: Interval) -> None:
        if len(self.intervals) < MAX_INTERVALS:
            self.intervals.append(interval)
        else:
            self.num_left_out += 1


class Recorder:
    """Logs of one worker, by room. The main thread may call any method, the KV sender's thread only ``add``."""

    def __init__(self) -> None:
        self._logs: OrderedDict[Room, Log] = OrderedDict()
        self._current: list[Log] = []
        """Logs of the requests in the current step."""

    def trace(self, room: Room) -> None:
        self._logs.setdefault(room, Log())
        if len(self._logs) > MAX_ROOMS:
            self._logs.popitem(last=False)

    def begin(self, plan: StepPlan) -> bool:
        """Start a step. Return whether it has traced requests, to whose logs ``note`` adds until ``end``."""
        for new in plan.new_requests:
            if new.traced:
                self.trace(new.room)
        self._current = (
            [self._logs[request.room] for request in plan.scheduled if request.room in self._logs] if self._logs else []
        )
        return bool(self._current)

    def note(self, interval: Interval) -> None:
        for log in self._current:
            log.add(interval)

    def end(self) -> None:
        self._current = []

    def add(self, room: Room, interval: Interval) -> None:
        if (log := self._logs.get(room)) is not None:
            log.add(interval)

    def enter(self, room: Room, state: str | None, now_s: float) -> None:
        """Record that a request enters a state at the leader, or ends. Its previous state becomes an interval."""
        if (log := self._logs.get(room)) is not None:
            if log.state:
                log.add(Interval(REQUEST, log.state, log.since_s, now_s))
            log.state, log.since_s = state or "", now_s

    def take(self, room: Room, now_s: float) -> Log:
        """Remove and return a request's log. The log is empty if the request was not traced."""
        self.enter(room, None, now_s)
        return self._logs.pop(room, None) or Log()
