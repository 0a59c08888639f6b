"""Traces in the Trace Event format: complete for Perfetto, with times shifted only between machines."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.clock import ClockReading, Interval
from cluster.spec.ids import Role, Room, replica_id
from cluster.spec.messages import Message, RankTrace
from cluster.spec.step_messages import ReportTrace
from router import request_trace
from router.request import ChoiceId
from router.request_trace import MAX_KEPT, RequestTrace, RequestTraces
from tests.fakes.bootstrap import entry_of, peer_of
from tests.fakes.trace_events import arrows, check_trace, complete_events, process_names

HERE = ClockReading(machine="here", unix_offset_s=1000.0)
ELSEWHERE = ClockReading(machine="elsewhere", unix_offset_s=400.0)
RANKS = entry_of(peer_of("prefill-0")).ranks
SECONDS = st.floats(0, 1e6, allow_nan=False)


@st.composite
def nested(draw: st.DrawFn) -> list[Interval]:
    """Intervals of one track, each after or inside another."""
    times_s = sorted(draw(st.lists(SECONDS, min_size=2, max_size=12)))
    outer = Interval("compute", "outer", times_s[0], times_s[-1])
    pairs = zip(times_s[::2], times_s[1::2], strict=False)
    return [*(Interval("compute", "inner", start_s, end_s) for start_s, end_s in pairs), outer]


@given(nested(), nested())
def test_every_trace_is_valid_and_keeps_every_interval(router: list[Interval], rank: list[Interval]) -> None:
    trace = _trace(router, _rank_trace(rank, HERE))
    check_trace(trace)
    assert len(complete_events(trace)) == len(router) + len(rank)
    assert set(process_names(trace).values()) == {"router", "prefill-0 rank 0"}


def test_times_are_microseconds_since_the_request_arrived() -> None:
    router = [Interval("request", "read and tokenize", 5.0, 5.25)]
    rank = [Interval("compute", "step 1", 5.5, 5.75, {"tokens": 3})]
    trace = _trace(router, _rank_trace(rank, HERE))
    assert [(event["ts"], event["dur"], event["args"]) for event in complete_events(trace)] == [
        (0.0, 250_000.0, {}),
        (500_000.0, 250_000.0, {"tokens": 3}),
    ]


def test_another_machine_is_shifted_by_the_difference_of_unix_times() -> None:
    router = [Interval("request", "stream", 5.0, 6.0)]
    # At Unix time 1005.5, half a second after the arrival at 1005.0.
    trace = _trace(router, _rank_trace([Interval("compute", "step 1", 605.5, 606.0)], ELSEWHERE))
    assert complete_events(trace)[-1]["ts"] == 500_000.0


def test_arrows_lead_from_writes_to_the_time_in_which_decode_receives() -> None:
    writes = [Interval("kv sender", "write", start_s, start_s + 0.5) for start_s in (5.0, 7.0, 8.75)]
    receiving = Interval("request", "receiving", 6.0, 9.0)
    decode = msgspec.structs.replace(_rank_trace([receiving], HERE), replica=replica_id(Role.DECODE, 0))
    trace = _trace([Interval("request", "stream", 5.0, 9.5)], _rank_trace(writes, HERE), decode)
    check_trace(trace)
    begins, ends = arrows(trace)
    assert [(begin["pid"], begin["ts"]) for begin in begins.values()] == [(2, 0.0), (2, 2e6), (2, 3.75e6)]
    assert [(end["pid"], end["ts"]) for end in ends.values()] == [(3, 1e6), (3, 2.5e6), (3, 4e6)]


async def test_the_text_is_written_once_with_breaks() -> None:
    intervals = [Interval("compute", f"step {number}", number, number + 1) for number in range(2000)]
    trace = RequestTrace(Room(1), RANKS, [_rank_trace(intervals, HERE)], [Interval("request", "stream", 0.0, 2000.0)])
    writing = [asyncio.create_task(trace.text(HERE)) for _ in range(2)]
    num_passes = 0
    while not writing[0].done():
        await asyncio.sleep(0)
        num_passes += 1
    assert num_passes > 4
    first, second = await asyncio.gather(*writing)
    assert first is second
    assert len(complete_events(json.loads(first))) == 2001


def test_missing_ranks_are_named() -> None:
    trace = _trace([Interval("request", "stream", 1.0, 2.0)])
    assert trace["otherData"]["ranks that did not answer"] == ["prefill-0 rank 0"]


def _trace(router: list[Interval], *parts: RankTrace) -> Any:
    return json.loads(asyncio.run(RequestTrace(Room(1), RANKS, list(parts), router).text(HERE)))


def _rank_trace(intervals: list[Interval], clock: ClockReading) -> RankTrace:
    return RankTrace(
        room=Room(1),
        replica=replica_id(Role.PREFILL, 0),
        global_rank=0,
        clock=clock,
        intervals=intervals,
        num_left_out=0,
    )


async def test_a_trace_waits_for_its_ranks_and_names_those_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_trace, "GATHER_S", 0.01)
    sent: list[tuple[str, Message]] = []
    traces = RequestTraces("here", lambda address, message: sent.append((address, message)))
    traces.begin(ChoiceId(7), Room(1), RANKS)
    traces.end(ChoiceId(7), [])
    assert sent == [(RANKS[0].address, ReportTrace(room=Room(1), reply_to="here"))]
    incomplete = await traces.gather("7")
    assert incomplete is not None
    assert incomplete.missing == ["prefill-0 rank 0"]
    monkeypatch.setattr(request_trace, "GATHER_S", 60.0)
    waiting = asyncio.create_task(traces.gather("7"))
    await asyncio.sleep(0)
    for _ in range(2):
        traces.on_part(_rank_trace([], HERE))
    complete = await waiting
    assert complete is not None
    assert (complete.missing, len(complete.parts)) == ([], 1)


async def test_only_the_newest_traces_are_kept() -> None:
    traces = RequestTraces("here", lambda *_: None)
    for number in range(MAX_KEPT + 1):
        traces.begin(ChoiceId(number), Room(number), [])
    traces.end(ChoiceId(0), [])
    assert await traces.gather("0") is None
    assert await traces.gather(str(MAX_KEPT)) is not None
