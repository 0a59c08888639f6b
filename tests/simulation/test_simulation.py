"""Seeds keep all promises and are reproducible, and `baton simulate` reports failures."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.app import app
from cluster.simulator.campaign import Campaign, shrink
from cluster.simulator.draw import draw_scenario
from cluster.simulator.scenario import FaultKind, Scenario
from cluster.simulator.simulation import Outcome, Simulation
from cluster.spec.tiers import TierJobKind
from tests.simulation import defects

ROOT = Path(__file__).parents[2]
FAILING_SEED = 69
"""Seed in which the planted defect breaks a promise."""

TRACE = """
from cluster.simulator.draw import draw_scenario
from cluster.simulator.simulation import Simulation
for seed in range(6):
    print(*Simulation(draw_scenario(seed), traced=True).run().trace, sep="\\n")
"""


@pytest.fixture
def broken() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        defects.drop_the_drain_ack(patch)
        yield


def run(seed: int) -> Outcome:
    return Simulation(draw_scenario(seed), traced=True).run()


def campaign(seeds: range) -> Campaign:
    made = Campaign()
    made.run(seeds)
    return made


def test_no_seed_breaks_a_promise() -> None:
    made = campaign(range(80))
    assert made.violations == {}
    assert made.num_seeds == 80
    assert sum(made.ends.values()) == made.num_requests
    hazards = {"drop", "duplicate", "reorder", "stale", "fail_write", "flip", "fail_move"}
    assert {*FaultKind, *hazards, "quarantine"} == set(made.faults)
    assert set(made.moved) == {*TierJobKind, "layerwise load", "early"}
    assert all(made.ends[end] for end in ("finished", "failed", "left", "refused", "disconnected"))


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_seeds_break_no_promise(part: int) -> None:
    assert campaign(range(1000 * part, 1000 * (part + 1))).violations == {}


def test_a_seed_is_the_same_in_every_process() -> None:
    traces = [
        subprocess.run(
            [sys.executable, "-c", TRACE],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            timeout=120,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert traces[0].count(b"\n") > 1000
    assert traces[0] == traces[1]


@pytest.mark.usefixtures("broken")
def test_a_failing_scenario_is_made_smaller_and_still_fails() -> None:
    scenario = draw_scenario(FAILING_SEED)
    smaller, outcome = shrink(scenario)
    assert str(outcome.violation).startswith("Violation: still open at the time limit: decode-")
    assert len(smaller.requests) == 1
    assert len(smaller.faults) <= len(scenario.faults)
    assert len(outcome.trace) < len(run(FAILING_SEED).trace)
    assert Simulation(smaller, traced=True).run().trace == outcome.trace


def test_command_prints_one_json_object() -> None:
    result = CliRunner().invoke(app, ["simulate", "--seeds", "5", "--json"])
    assert result.exit_code == 0, result.output
    reported = json.loads(result.stdout)
    assert set(reported) == {"seeds", "requests", "faults", "violations", "seconds"}
    assert (reported["seeds"], reported["violations"]) == (5, 0)
    assert reported["requests"] == sum(len(draw_scenario(seed).requests) for seed in range(5))


@pytest.mark.usefixtures("broken")
def test_command_shows_the_trace_of_a_failing_seed_and_how_to_replay_it() -> None:
    result = CliRunner().invoke(app, ["simulate", "--seeds", "1", "--first", str(FAILING_SEED), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["violations"] == 1
    assert f"seed {FAILING_SEED}: Violation: still open" in result.stderr
    assert "Ticket(room=" in result.stderr
    assert result.stderr.endswith(f"replay: baton simulate --seeds 1 --first {FAILING_SEED}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_reports_its_results(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    def draw(seed: int) -> Scenario:
        if seed == 2:
            signal.raise_signal(number)
        return draw_scenario(seed)

    monkeypatch.setattr("cluster.simulator.campaign.draw_scenario", draw)
    usual = signal.getsignal(number)
    result = CliRunner().invoke(app, ["simulate", "--seeds", "1000000", "--json"])
    assert result.exit_code == 128 + number
    assert json.loads(result.stdout)["seeds"] == 3
    assert result.stderr == f"{number.name}: stopped after 3 of 1000000 seeds\n"
    assert signal.getsignal(number) is usual


def test_command_without_json_prints_lines() -> None:
    result = CliRunner().invoke(app, ["simulate", "--seeds", "3"])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "violations: 0"
