"""The report of `baton bench serve` for people."""

import dataclasses

from rich.console import Console
from rich.table import Table

from cluster.bench.statistics import Quantiles, Report


def print_report(title: str, report: Report, best_hit_rate: float | None) -> None:
    """Print latencies, throughput and failures; with the hit rate that an infinite cache would have had, also ours."""
    table = Table(title=title, title_justify="left")
    for column in ("milliseconds", "mean", "p50", "p90", "p99"):
        table.add_column(column, justify="left" if column == "milliseconds" else "right")
    for name, quantiles in _latencies(report):
        table.add_row(name, *(f"{value:.2f}" for value in dataclasses.astuple(quantiles)))
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{report.completed} completed, {report.failed} failed in {report.duration_s:.2f} s: "
        f"{report.requests_per_s:.2f} requests/s, {report.output_tokens_per_s:.1f} output tokens/s, "
        f"{report.total_tokens_per_s:.1f} tokens/s in all"
    )
    if best_hit_rate is not None:
        console.print(
            f"{report.hit_rate:.2%} of the prompt tokens were cached; an infinite cache would have had "
            f"{best_hit_rate:.2%}"
        )
    for error, count in report.errors.items():
        console.print(f"{count} x {error}", markup=False)


def _latencies(report: Report) -> list[tuple[str, Quantiles]]:
    named = (
        ("time to first token", report.ttft_ms),
        ("time per output token", report.tpot_ms),
        ("between pieces (ITL)", report.itl_ms),
        ("whole request", report.e2e_ms),
    )
    return [(name, quantiles) for name, quantiles in named if quantiles is not None]
