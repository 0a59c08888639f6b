"""Report with one line per scenario: the fault, and its effect on clients."""

from dataclasses import dataclass, fields

from tests.chaos.rest import settle
from tests.chaos.streams import Crowd
from tests.fakes.cluster import RunningCluster


@dataclass(kw_only=True)
class Line:
    """Result of one scenario. Times are in seconds since the fault, and None if the event was not expected."""

    scenario: str
    success: int
    failed: int
    hung: int
    refused: int = 0
    """Number of requests that were refused immediately, with a reason."""
    longest_pause_s: float
    """Longest pause between two tokens of a stream."""
    detection_s: float | None = None
    """Time until the table no longer showed the victim's old state."""
    recovery_s: float | None = None
    """Time until everything was ready again."""
    retries: int | None = None
    continuations: int | None = None
    """Number of continued requests. None, like the retries, if a router was replaced, because its counters restart."""
    leaked_pages: int = 0
    """Pages in use after all requests have ended."""
    proof: str = ""
    """Proof that the fault happened."""


LINES: list[Line] = []
"""Lines of this session."""


def report(scenario: str, cluster: RunningCluster, crowd: Crowd, proof: str, **found: float | None) -> Line:
    """Record the results once the cluster is idle, or after a timeout what is still in use."""
    settle(cluster)
    wrong = [stream.end for stream in crowd.streams if stream.end.startswith("wrong")]
    assert not wrong, wrong
    loads = [entry["load"] for entry in cluster.replicas().values()]
    line = Line(
        scenario=scenario,
        success=crowd.count("right"),
        failed=crowd.count("failed"),
        hung=crowd.count("hung"),
        refused=crowd.count("refused"),
        longest_pause_s=max(stream.longest_pause_s for stream in crowd.streams),
        leaked_pages=sum(load["total_pages"] - load["free_pages"] for load in loads),
        proof=proof,
    )
    for name, value in found.items():
        setattr(line, name, value)
    LINES.append(line)
    return line


def as_table(lines: list[Line]) -> str:
    """Return the lines as a Markdown table."""
    names = [field.name for field in fields(Line)]
    rows = [names, ["---"] * len(names)]
    rows += [[_text(getattr(line, name)) for name in names] for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
