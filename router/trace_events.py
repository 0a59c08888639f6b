"""A timeline in the Trace Event Format, which Perfetto and chrome://tracing read. Pure.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterator, Sequence
from typing import Any

from cluster.spec.messages import Gathered
from cluster.spec.timeline import ClockReading, Interval
from router.timelines import rank_name


def trace_of(gathered: Gathered, clock: ClockReading) -> dict[str, Any]:
    """The JSON object: one process for the router and each rank, one thread a lane, microseconds since arrival.

    Args:
        gathered: of a request that has ended.
        clock: the router's; processes of another machine are shifted by the difference of their Unix times.
    """
    assert gathered.router is not None, "a request is written when it has ended"
    origin_s = min((interval.start_s for interval in gathered.router), default=0.0)
    events = list(_process(1, "router", gathered.router, origin_s))
    timelines = sorted(gathered.timelines, key=lambda part: (part.replica.startswith("decode"), part.global_rank))
    for pid, part in enumerate(timelines, start=2):
        same = part.clock.machine == clock.machine
        shift_s = 0.0 if same else part.clock.unix_offset_s - clock.unix_offset_s
        name = rank_name(part.replica, part.global_rank)
        events += _process(pid, name, part.intervals, origin_s - shift_s)
    left_out = {rank_name(part.replica, part.global_rank): part.num_left_out for part in timelines if part.num_left_out}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"ranks that did not answer": gathered.missing, "intervals left out": left_out},
    }


def _process(pid: int, name: str, intervals: Sequence[Interval], origin_s: float) -> Iterator[dict[str, Any]]:
    yield _label(pid, 0, "process_name", name=name)
    yield _label(pid, 0, "process_sort_index", sort_index=pid)
    by_start = sorted(intervals, key=lambda interval: interval.start_s)
    lanes = {lane: tid for tid, lane in enumerate(dict.fromkeys(interval.lane for interval in by_start), start=1)}
    for lane, tid in lanes.items():
        yield _label(pid, tid, "thread_name", name=lane)
    for interval in intervals:
        start_us, end_us = (_micros(time_s - origin_s) for time_s in (interval.start_s, interval.end_s))
        yield {
            "name": interval.name,
            "cat": interval.lane,
            "ph": "X",
            "ts": start_us,
            "dur": round(end_us - start_us, 3),
            "pid": pid,
            "tid": lanes[interval.lane],
            "args": interval.facts,
        }


def _label(pid: int, tid: int, what: str, **args: str | int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _micros(time_s: float) -> float:
    return round(time_s * 1e6, 3)
