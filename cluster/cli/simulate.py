"""`baton simulate`: the control code of a cluster in virtual time, with faults and without processes."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cluster.simulator.campaign import Campaign


def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="Number of scenarios to run, one per seed.")] = 200,
    first: Annotated[int, typer.Option(min=0, help="First seed. Use the number of a failing seed to replay it.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run router, bootstrap, schedulers, transfers and supervisor under simulated faults.

    If a seed fails, its scenario is minimized and traced on stderr, and the exit code is 1.

    Ctrl-C and SIGTERM end the run after the current seed; the results so far are still printed.
    """
    # Each command imports what it needs, so that the command line starts quickly.
    from cluster.simulator.campaign import Campaign

    campaign = Campaign()
    start_s = time.perf_counter()
    with _noting_signals() as noted:
        if sys.stderr.isatty():
            with typer.progressbar(range(first, first + seeds), label="seeds", file=sys.stderr) as numbers:
                campaign.run(takewhile(lambda _: not noted, numbers))
        else:
            campaign.run(takewhile(lambda _: not noted, range(first, first + seeds)))
    seconds = round(time.perf_counter() - start_s, 3)
    if as_json:
        totals = {
            "seeds": campaign.num_seeds,
            "requests": campaign.num_requests,
            "faults": dict(sorted(campaign.faults.items())),
            "violations": len(campaign.violations),
            "seconds": seconds,
        }
        typer.echo(json.dumps(totals))
    else:
        _print(campaign, seconds)
    for seed, violation in campaign.violations.items():
        typer.echo(f"seed {seed}: {violation}", err=True)
    if noted:
        typer.echo(f"{noted[0].name}: stopped after {campaign.num_seeds} of {seeds} seeds", err=True)
        raise typer.Exit(128 + noted[0])
    if campaign.violations:
        _print_shortest(min(campaign.violations))
        raise typer.Exit(1)


@contextmanager
def _noting_signals() -> Iterator[list[signal.Signals]]:
    """Record the first stop signal. The next one has its usual effect."""
    noted: list[signal.Signals] = []
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _: object) -> None:
        noted.append(signal.Signals(number))
        reset()

    def reset() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)

    for number in usual:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        reset()


def _print(campaign: "Campaign", seconds: float) -> None:
    typer.echo(f"{campaign.num_seeds} seeds, {campaign.num_requests} requests in {seconds:.1f} s")
    for title, counts in (("requests", campaign.ends), ("faults", campaign.faults)):
        typer.echo(f"{title}: {', '.join(f'{count} {name}' for name, count in sorted(counts.items())) or 'none'}")
    typer.echo(f"violations: {len(campaign.violations)}")


def _print_shortest(seed: int) -> None:
    from cluster.simulator.campaign import shrink
    from cluster.simulator.draw import draw_scenario

    scenario, outcome = shrink(draw_scenario(seed))
    typer.echo(f"\nseed {seed}, minimized to {len(scenario.requests)} requests:", err=True)
    for line in (scenario.shape, scenario.hazards, *scenario.faults, *outcome.trace, outcome.violation):
        typer.echo(str(line), err=True)
    typer.echo(f"replay: baton simulate --seeds 1 --first {seed}", err=True)
