"""One line for each scenario: what was done to the cluster and what became of its clients."""

from dataclasses import dataclass, fields

from tests.chaos.rest import settle
from tests.chaos.streams import Crowd
from tests.fakes.cluster import RunningCluster


@dataclass(kw_only=True)
class Line:
    """The times are seconds since the fault; None where nothing of the kind was to happen."""

    scenario: str
    success: int
    failed: int
    hung: int
    refused: int = 0
    """At once, with a reason."""
    longest_pause_s: float
    """Between two tokens of one stream."""
    detection_s: float | None = None
    """Until the table did not show the victim as it was."""
    recovery_s: float | None = None
    """Until all was ready again."""
    retries: int | None = None
    continuations: int | None = None
    """None for both where a router was replaced, which counts anew."""
    leaked_pages: int = 0
    """Held when nobody asks for anything any more."""
    proof: str = ""
    """That the fault happened."""


LINES: list[Line] = []
"""Of this session."""


def report(scenario: str, cluster: RunningCluster, crowd: Crowd, proof: str, **found: float | None) -> Line:
    """Write down what is seen when everything has come to rest; or, after long enough, what is still held."""
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
    """Markdown."""
    names = [field.name for field in fields(Line)]
    rows = [names, ["---"] * len(names)]
    rows += [[_text(getattr(line, name)) for name in names] for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
