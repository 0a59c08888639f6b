"""Traces of requests in the Trace Event Format, collected from every rank when a request ends.

Perfetto and chrome://tracing read this format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cluster.spec.clock import ClockReading, Interval
from cluster.spec.ids import Room
from cluster.spec.messages import Message, RankTrace
from cluster.spec.registry import RankRecord
from cluster.spec.step_messages import ReportTrace
from router.request import ChoiceId

MAX_KEPT = 8
"""Maximum number of stored traces. The oldest one is deleted first."""
GATHER_S = 30.0
"""Maximum time to wait for ranks, which answer between two steps."""
_MOST_AT_ONCE = 500
"""Number of events that are written without a break, in a few milliseconds."""
_WRITES, _RECEIVING = "kv sender", "receiving"
"""Track of a prefill rank's writes, and name of the interval in which decode receives them."""


@dataclass(slots=True)
class RequestTrace:
    attempt: Room
    """Room of the request's last attempt; earlier ones are not shown."""
    ranks: Sequence[RankRecord]
    parts: list[RankTrace] = field(default_factory=list)
    router: list[Interval] | None = None
    """Intervals of the router; None until the request has ended."""
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    _text: bytes | None = None
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def missing(self) -> list[str]:
        answered = set(map(_rank_name, self.parts))
        return [name for name in map(_rank_name, self.ranks) if name not in answered]

    async def text(self, clock: ClockReading) -> bytes:
        """Return the JSON object: one process for the router and for each rank, and one thread per track.

        Times are in microseconds since the request arrived. Times from other machines are shifted by the difference
        between their clock's offset from Unix time and that of ``clock``, the router's clock. The object is written
        once, with breaks for the events of other requests.
        """
        async with self._writing:
            if self._text is None or self.missing:
                events = []
                each = self._each(clock)
                while some := [*itertools.islice(each, _MOST_AT_ONCE)]:
                    events.append(msgspec.json.encode(some)[1:-1])
                    await asyncio.sleep(0)
                self._text = b'{"traceEvents":[%b],%b' % (b",".join(events), msgspec.json.encode(self._facts)[1:])
            return self._text

    def _each(self, clock: ClockReading) -> Iterator[dict[str, Any]]:
        assert self.router is not None, "the request has ended"
        origin_s = min((interval.start_s for interval in self.router), default=0.0)
        yield from _process(1, "router", self.router, origin_s)
        handoff = []
        parts = sorted(self.parts, key=lambda part: (part.replica.startswith("decode"), part.global_rank))
        for pid, part in enumerate(parts, start=2):
            name, part_origin_s = _rank_name(part), origin_s - part.clock.shift_s(clock)
            for event in _process(pid, name, part.intervals, part_origin_s):
                yield event
                if event["name"] == _RECEIVING or event.get("cat") == _WRITES:
                    handoff.append(event)
        yield from _arrows(handoff)

    @property
    def _facts(self) -> dict[str, Any]:
        left_out = {_rank_name(part): part.num_left_out for part in self.parts if part.num_left_out}
        return {
            "displayTimeUnit": "ms",
            "otherData": {"ranks that did not answer": self.missing, "omitted intervals": left_out},
        }


class RequestTraces:
    """The latest traces of this process. Not thread-safe: all methods run in one event loop."""

    def __init__(self, reply_to: str, send: Callable[[str, Message], None]) -> None:
        """Start without traces; ``reply_to`` is the address of this process's inbox."""
        self._reply_to = reply_to
        self._send = send
        self._traces: OrderedDict[ChoiceId, RequestTrace] = OrderedDict()

    def begin(self, choice_id: ChoiceId, attempt: Room, ranks: Sequence[RankRecord]) -> None:
        """Start the trace of a request's next attempt, which runs on these ranks."""
        self._traces[choice_id] = RequestTrace(attempt, ranks)
        if len(self._traces) > MAX_KEPT:
            self._traces.popitem(last=False)

    def end(self, choice_id: ChoiceId, router: list[Interval]) -> None:
        """Add the router's part of a finished request's trace, and request the ranks' parts."""
        if (trace := self._traces.get(choice_id)) is None:
            return
        trace.router = router
        for rank in trace.ranks:
            self._send(rank.address, ReportTrace(room=trace.attempt, reply_to=self._reply_to))

    def on_part(self, part: RankTrace) -> None:
        """Add a rank's part; ignore an unexpected one."""
        trace = next((trace for trace in self._traces.values() if trace.attempt == part.room), None)
        if trace is None or _rank_name(part) not in trace.missing:
            return
        trace.parts.append(part)
        if not trace.missing:
            trace.complete.set()

    async def gather(self, name: str) -> RequestTrace | None:
        """Return a request's trace once every rank has answered or ``GATHER_S`` has passed; None if not found."""
        trace = next((trace for choice_id, trace in self._traces.items() if str(choice_id) == name), None)
        if trace is not None and trace.ranks:
            with suppress(TimeoutError):
                await asyncio.wait_for(trace.complete.wait(), GATHER_S)
        return trace


def _rank_name(rank: RankRecord | RankTrace) -> str:
    return f"{rank.replica} rank {rank.global_rank}"


def _process(pid: int, name: str, intervals: Sequence[Interval], origin_s: float) -> Iterator[dict[str, Any]]:
    yield _label(pid, 0, "process_name", name=name)
    yield _label(pid, 0, "process_sort_index", sort_index=pid)
    by_start = sorted(intervals, key=lambda interval: interval.start_s)
    tracks = {track: tid for tid, track in enumerate(dict.fromkeys(interval.track for interval in by_start), start=1)}
    for track, tid in tracks.items():
        yield _label(pid, tid, "thread_name", name=track)
    for interval in intervals:
        start_us, end_us = (round((at_s - origin_s) * 1e6, 3) for at_s in (interval.start_s, interval.end_s))
        yield {
            "name": interval.name,
            "cat": interval.track,
            "ph": "X",
            "ts": start_us,
            "dur": round(end_us - start_us, 3),
            "pid": pid,
            "tid": tracks[interval.track],
            "args": interval.facts,
        }


def _arrows(events: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield arrows from the writes of KV to the time in which decode receives it."""
    target = next((event for event in events if event["name"] == _RECEIVING), None)
    if target is None:
        return
    begin_us, end_us = target["ts"], target["ts"] + target["dur"]
    for number, write in enumerate(event for event in events if event.get("cat") == _WRITES):
        arrow = {"name": "KV", "cat": "kv", "id": number}
        arrives_us = min(max(begin_us, write["ts"] + write["dur"]), end_us)
        yield arrow | {"ph": "s", "ts": write["ts"], "pid": write["pid"], "tid": write["tid"]}
        yield arrow | {"ph": "f", "bp": "e", "ts": arrives_us, "pid": target["pid"], "tid": target["tid"]}


def _label(pid: int, tid: int, what: str, **args: str | int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}
