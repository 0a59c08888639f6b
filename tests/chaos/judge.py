"""Verdict on the results of an endurance run."""

from collections.abc import Iterator, Mapping
from typing import Any

from tests.chaos.random_faults import FIRST, MORTAL, VICTIMS

EVERY_KIND_MINUTES = 20.0
"""Minutes after which each kind of fault must have occurred."""
IN_A_STREAM = 'data: {"error"'
MOST_FAILED = 0.001
"""Greatest share of failed requests among those that a living replica of each role could have served."""
MOST_MIB_A_MINUTE = 0.5
MOST_PEAK = 1.25
"""Limit on the memory of replaced processes, as a multiple of the memory of permanent ones."""
FEW = 8
"""Number of additional descriptors that a process may have, for connections kept open for the next request."""


def problems(result: Mapping[str, Any]) -> list[str]:
    """Return everything that is wrong."""
    return [*_of_requests(result), *_of_faults(result), *_of_memory(result), *_of_holdings(result)]


def _of_requests(result: Mapping[str, Any]) -> Iterator[str]:
    ends, failed = result["requests"], result["failed_without_a_gap"]
    if not ends.get("right"):
        yield "no request was right"
    for end in ("wrong", "hung"):
        if ends.get(end):
            yield f"{ends[end]} {end}"
    if len(failed) > MOST_FAILED * (ends.get("right", 0) + len(failed)):
        yield f"{len(failed)} failed although both roles had a living replica"
    if cut := [failure for failure in failed if IN_A_STREAM in failure]:
        yield f"{len(cut)} streams ended with an error although both roles had a living replica"
    yield from (f"{replica} was replaced without a fault" for replica in result["replaced_without_a_fault"])


def _of_faults(result: Mapping[str, Any]) -> Iterator[str]:
    if result["minutes"] >= EVERY_KIND_MINUTES and not result["calm"]:
        yield from (f"no {kind}" for kind in (FIRST, *VICTIMS) if not result["faults"].get(kind))


def _of_memory(result: Mapping[str, Any]) -> Iterator[str]:
    memory, peaks = result["memory"], result["peak_mib"]
    for name in result["before"]["descriptors"]:
        replica, _, rank = name.partition(" ")
        if replica in MORTAL:
            like = f"{replica.partition('-')[0]}-0 {rank}"
            if peaks.get(name, 0.0) > MOST_PEAK * peaks.get(like, 0.0):
                yield f"{name} had {peaks[name]} MiB, {like} {peaks.get(like, 0.0)}"
        elif name != "bootstrap" and name not in memory:
            yield f"{name} did not live long enough to see whether it grows"
    for name, seen in memory.items():
        if seen["mib_a_minute"] >= MOST_MIB_A_MINUTE:
            yield f"{name} grows by {seen['mib_a_minute']} MiB a minute"


def _of_holdings(result: Mapping[str, Any]) -> Iterator[str]:
    for name in ("open_requests", "waiting_requests", "num_held_pages", "quarantined_pages"):
        if result[name]:
            yield f"{result[name]} {name}"
    before, after = result["before"], result["after"]
    for name, count in after["descriptors"].items():
        had = before["descriptors"].get(name, 0)
        if count > had + FEW:
            yield f"{name} has {count} descriptors, {had} at first"
    if after["shared_memories"] != before["shared_memories"]:
        yield f"{after['shared_memories']} shared memories, {before['shared_memories']} at first"
