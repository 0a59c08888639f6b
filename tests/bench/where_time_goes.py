"""Sums up a trace: what every process did until the client had its first token."""

from collections import defaultdict
from typing import Any


def where_time_goes(trace: dict[str, Any]) -> list[str]:
    """One line a process, milliseconds by what they were spent on; only what began before the first token left.

    ``attention`` is a layer's attention half, collectives inside it included; ``layer`` is what lies outside both
    halves, and ``step`` what lies outside the layers: preparing the batch, and the first token's logits.
    """
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    first_token_us = next(event["ts"] for event in events if event["name"] == "stream")
    sums: dict[int, defaultdict[str, float]] = {pid: defaultdict(float) for pid in names}
    for event in events:
        if event["ts"] < first_token_us:
            kind = event["name"].split(" ")[0] if event["cat"] == "compute" else f"{event['name']}"
            sums[event["pid"]][kind] += event["dur"] / 1e3
    for kinds in sums.values():
        kinds["step"] -= kinds["layer"]
        kinds["layer"] -= kinds["attention"] + kinds["mlp"]
    return [
        f"{names[pid]}: " + ", ".join(f"{kind} {spent_ms:.1f}" for kind, spent_ms in kinds.items() if spent_ms)
        for pid, kinds in sums.items()
    ]
