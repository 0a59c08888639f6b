"""Draw the trace of one request as a picture: python docs/draw_trace.py trace.json > docs/trace.svg"""

import json
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, TRACK, GAP, TOP = 1040, 150, 18, 8, 34
LEAST_PX = 0.4
"""Narrower intervals are left out."""
LABEL_PX = 6.2
"""Width of a letter."""
COLOURS = {
    "request": "#9aa5b1",
    "step": "#486581",
    "layer": "#829ab1",
    "attention": "#4c86c6",
    "mlp": "#6bb38a",
    "collectives": "#e0803a",
    "kv sender": "#9b6bb3",
}


STYLE = """
text { fill: #243b53 } text.inside { fill: #1c2127 }
.back { fill: #fff } line { stroke: #e4e7eb } .edge { stroke: #fff }
@media (prefers-color-scheme: dark) {
text { fill: #d5dbe3 } .back { fill: #14171b } line { stroke: #333a43 } .edge { stroke: #14171b } }
"""


def draw(trace: dict[str, Any]) -> str:
    """The SVG."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    per_us = (WIDTH - LEFT - 10) / max(event["ts"] + event["dur"] for event in events)
    shapes: list[str] = []
    top = TOP
    for pid, name in names.items():
        shapes.append(text(8, top + 13, name, weight="bold"))
        for tid in sorted({event["tid"] for event in events if event["pid"] == pid}):
            mine = [event for event in events if (event["pid"], event["tid"]) == (pid, tid)]
            shapes += lane_shapes(mine, top, per_us)
            top += TRACK
        top += GAP
    body = [*axis(per_us, top), *shapes, *legend(top + 8)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 32}" font-family="sans-serif" '
        f'font-size="11"><style>{STYLE}</style><rect width="100%" height="100%" class="back"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def lane_shapes(events: list[dict[str, Any]], top: float, per_us: float) -> Iterator[str]:
    """Outer intervals first, so that inner ones lie on them."""
    for event in sorted(events, key=lambda event: -event["dur"]):
        left, width = LEFT + event["ts"] * per_us, event["dur"] * per_us
        if width < LEAST_PX:
            continue
        kind = kind_of(event)
        inset = 3 if kind in ("attention", "mlp") else 0
        yield (
            f'<rect x="{left:.1f}" y="{top + inset}" width="{width:.1f}" height="{TRACK - 3 - inset}" '
            f'fill="{COLOURS[kind]}" class="edge" stroke-width="{0.5 if width > 3 else 0}"/>'
        )
        if len(event["name"]) * LABEL_PX < width and event["cat"] == "request":
            yield text(left + 4, top + 11, event["name"], kind="inside")


def kind_of(event: dict[str, Any]) -> str:
    """Return the kind of work that an event's colour stands for."""
    return event["name"].split(" ")[0] if event["cat"] == "compute" else event["cat"]


def axis(per_us: float, bottom: float) -> Iterator[str]:
    """A line every so many milliseconds, ten at most."""
    span_us = (WIDTH - LEFT - 10) / per_us
    step_us = next(
        step for step in (10.0**power * part for power in range(9) for part in (1, 2, 5)) if step * 10 > span_us
    )
    for number in range(int(span_us / step_us) + 1):
        left = LEFT + number * step_us * per_us
        yield f'<line x1="{left:.1f}" x2="{left:.1f}" y1="22" y2="{bottom}"/>'
        if left < WIDTH - 60:
            yield text(left, 16, f"{number * step_us / 1000:g} ms")


def legend(top: float) -> Iterator[str]:
    """Draw the meaning of each colour."""
    for number, (kind, colour) in enumerate(COLOURS.items()):
        left = LEFT + number * 120
        yield f'<rect x="{left}" y="{top}" width="12" height="12" fill="{colour}"/>' + text(left + 17, top + 10, kind)


def text(left: float, base: float, words: str, weight: str = "normal", kind: str = "outside") -> str:
    """A line of text."""
    return f'<text x="{left:.1f}" y="{base:.1f}" font-weight="{weight}" class="{kind}">{escape(words)}</text>'


if __name__ == "__main__":
    print(draw(json.loads(Path(sys.argv[1]).read_text())), end="")
