"""`baton simulate`: the control code of a whole cluster on virtual time, under faults; nothing is started."""

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cluster.simulator.campaign import Campaign


def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="How many scenarios to run; each seed is one.")] = 200,
    first: Annotated[int, typer.Option(min=0, help="The first seed; a failing one is replayed by its number.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run router, bootstrap, schedulers, transfers and supervisor under simulated faults; exit code 1 on a violation.

    A failing seed is made as small as it still fails, and its trace is printed on stderr.
    """
    # The command line starts quickly because each command loads what it needs.
    from cluster.simulator.campaign import Campaign

    campaign = Campaign()
    start_s = time.perf_counter()
    if sys.stderr.isatty():
        with typer.progressbar(range(first, first + seeds), label="seeds", file=sys.stderr) as numbers:
            campaign.run(numbers)
    else:
        campaign.run(range(first, first + seeds))
    seconds = round(time.perf_counter() - start_s, 3)
    if as_json:
        typer.echo(json.dumps(_as_json(campaign, seconds)))
    else:
        _print(campaign, seconds)
    if campaign.violations:
        _print_shortest(campaign)
        raise typer.Exit(1)


def _as_json(campaign: "Campaign", seconds: float) -> dict[str, object]:
    return {
        "seeds": campaign.num_seeds,
        "requests": campaign.num_requests,
        "faults": dict(sorted(campaign.faults.items())),
        "violations": len(campaign.violations),
        "seconds": seconds,
    }


def _print(campaign: "Campaign", seconds: float) -> None:
    typer.echo(f"{campaign.num_seeds} seeds, {campaign.num_requests} requests in {seconds:.1f} s")
    for title, counts in (("requests", campaign.ends), ("faults", campaign.faults)):
        typer.echo(f"{title}: {', '.join(f'{count} {name}' for name, count in sorted(counts.items())) or 'none'}")
    typer.echo(f"violations: {len(campaign.violations)}")


def _print_shortest(campaign: "Campaign") -> None:
    from cluster.simulator.draw import draw_scenario
    from cluster.simulator.shrink import shrink

    for seed, violation in campaign.violations.items():
        typer.echo(f"seed {seed}: {violation}", err=True)
    seed = min(campaign.violations)
    scenario, outcome = shrink(draw_scenario(seed))
    typer.echo(
        f"\nseed {seed}, without what it does not need: {len(scenario.asks)} requests, {scenario.shape}", err=True
    )
    for line in (scenario.shape, scenario.hazards, *scenario.faults, *outcome.trace, outcome.violation):
        typer.echo(str(line), err=True)
    typer.echo(f"replay: baton simulate --seeds 1 --first {seed}", err=True)
