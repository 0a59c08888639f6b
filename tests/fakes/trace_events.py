"""Reader of Trace Event JSON that applies the format's rules like a viewer."""

from itertools import groupby
from typing import Any

ROUNDING_US = 0.01


def complete_events(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events that have a duration."""
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def process_names(trace: dict[str, Any]) -> dict[int, str]:
    """Return process names by process id."""
    return {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}


def check_trace(trace: dict[str, Any]) -> None:
    """Check that all events have known kinds, processes and threads have names, and a thread's events are nested."""
    named = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert {event["ph"] for event in trace["traceEvents"]} <= {"M", "X", "s", "f"}
    for event in complete_events(trace):
        assert isinstance(event["name"], str)
        assert isinstance(event["ts"], int | float)
        assert event["dur"] >= 0
        assert event["pid"] in process_names(trace)
        assert (event["pid"], event["tid"]) in named
        assert isinstance(event["args"], dict)

    _check_arrows(trace)

    def thread(event: dict[str, Any]) -> tuple[int, int]:
        return event["pid"], event["tid"]

    for _, events in groupby(sorted(complete_events(trace), key=thread), thread):
        _check_nesting(sorted(events, key=lambda event: (event["ts"], -event["dur"])))


def _check_arrows(trace: dict[str, Any]) -> None:
    """Check that every arrow has one begin and one end, each inside an event of its thread."""
    begins, ends = arrows(trace)
    assert begins.keys() == ends.keys()
    for number, begin in begins.items():
        assert begin["ts"] <= ends[number]["ts"] + ROUNDING_US
        for event in (begin, ends[number]):
            around = [other for other in complete_events(trace) if other["tid"] == event["tid"]]
            assert any(
                other["pid"] == event["pid"] and -ROUNDING_US <= event["ts"] - other["ts"] <= other["dur"] + ROUNDING_US
                for other in around
            ), f"nothing is around {event}"


def arrows(trace: dict[str, Any]) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
    """Return the begins and the ends of arrows by id."""
    found: dict[str, dict[int, dict[str, Any]]] = {"s": {}, "f": {}}
    for event in trace["traceEvents"]:
        if event["ph"] in found:
            assert event["id"] not in found[event["ph"]], "two arrows have one id"
            found[event["ph"]][event["id"]] = event
    return found["s"], found["f"]


def _check_nesting(events: list[dict[str, Any]]) -> None:
    """Check that each event of a thread, sorted by start, ends before the event around it."""
    open_ends_us: list[float] = []
    for event in events:
        while open_ends_us and open_ends_us[-1] <= event["ts"] + ROUNDING_US:
            open_ends_us.pop()
        end_us = event["ts"] + event["dur"]
        assert not open_ends_us or end_us <= open_ends_us[-1] + ROUNDING_US, f"{event} overlaps its neighbour"
        open_ends_us.append(end_us)
