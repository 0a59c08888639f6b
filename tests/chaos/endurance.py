"""Mixed traffic with random faults that overlap: ``python -m tests.chaos.endurance --minutes 30 [--seed N]``.

Requires root and nft. With ``--hostile``, another client attacks the router all the time (``tests.chaos.hostile``).
With ``--calm``, there are no faults, so that all processes live to the end. Prints one JSON object: requests by
outcome, faults, memory growth of long-lived processes, resources at the start and the end, and the problems
(``judge``). With problems, the exit code is 1. In runs of less than about ten minutes, processes still warm up, which
appears as growth.
"""

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import httpx

from cluster.spec.errors import BatonError
from tests.chaos.availability import Availability
from tests.chaos.census import Census, Holdings
from tests.chaos.hostile import ATTACKS, attack_command
from tests.chaos.judge import problems
from tests.chaos.random_faults import Faults
from tests.chaos.rest import settle
from tests.chaos.traffic import Traffic
from tests.chaos.watch import metric
from tests.fakes.cluster import RunningCluster, running_cluster

NAME = "test-endurance"
SETTINGS = ("kv.memory_gib=0.25", "transfer.verify=digest")
CLIENTS = 4
SAMPLE_S = 5.0
CALM_S = 15.0
LARGE, WARM_UP = ("1,024 long prompts", "1,024 choices", "log-probabilities of 128 choices"), 6
"""Legal requests that need most memory, and how often they are sent before the measurement. The heaps no longer grow
then."""


def measure(cluster: RunningCluster, given: argparse.Namespace) -> dict[str, object]:
    """Run the measurement."""
    minutes, seed = given.minutes, given.seed
    census, traffic, availability = Census(NAME), Traffic(cluster.url, seed), Availability(cluster, NAME)
    if given.hostile:
        for _ in range(WARM_UP):
            for name in LARGE:
                _send(cluster.url, name)
    before = holdings_at_rest(cluster, census)
    faults, ending = Faults(cluster, NAME, seed, availability), threading.Event()
    attacks: Counter[str] = Counter()
    others = [
        threading.Thread(target=_sample, args=(census, ending), daemon=True),
        threading.Thread(target=availability.watch, args=(ending,), daemon=True),
    ]
    if given.hostile:
        others.append(threading.Thread(target=_attack, args=(cluster.url, seed, ending, attacks), daemon=True))
    for other in others:
        other.start()
    begin_s = time.monotonic()
    with traffic.clients(given.clients):
        if given.calm:
            time.sleep(60 * minutes)
        else:
            faults.go_on(begin_s + 60 * minutes)
    ending.set()
    for other in others:
        other.join()
    after = holdings_at_rest(cluster, census)
    loads = [entry["load"] for entry in cluster.replicas().values()]
    failed = [failure for failure in traffic.failures if not availability.has_gap(failure.start_s, failure.end_s)]
    return {
        "minutes": minutes,
        "clients": given.clients,
        "seed": seed,
        "calm": given.calm,
        "requests": dict(traffic.counts),
        "kinds": dict(traffic.kinds),
        "faults": dict(faults.counts),
        "gaps": [f"{start_s - begin_s:.1f} to {end_s - begin_s:.1f} s" for start_s, end_s in availability.gaps],
        "gap_s": round(sum(end_s - start_s for start_s, end_s in availability.gaps), 1),
        "failed_in_a_gap": len(traffic.failures) - len(failed),
        "failed_without_a_gap": [failure.tell(begin_s) for failure in failed],
        "replaced_without_a_fault": availability.unprovoked,
        "log": faults.log,
        "attacks": dict(attacks),
        "retries": metric(cluster, "baton_request_retries_total"),
        "continuations": metric(cluster, "baton_request_continuations_total"),
        "memory": _growth(census, minutes),
        "peak_mib": _peaks(census),
        "open_requests": metric(cluster, "baton_num_requests_running") + sum(load["num_running"] for load in loads),
        "waiting_requests": sum(load["num_waiting"] for load in loads),
        "num_held_pages": sum(load["total_pages"] - load["free_pages"] for load in loads),
        "quarantined_pages": sum(load["quarantined_pages"] for load in loads),
        "before": asdict(before),
        "after": asdict(after),
    }


def holdings_at_rest(cluster: RunningCluster, census: Census) -> Holdings:
    """Return the resources in use after some requests, when all current processes have communicated."""
    with Traffic(cluster.url, seed=0).clients(CLIENTS):
        time.sleep(CALM_S)
    settle(cluster)
    return census.holdings()


def _sample(census: Census, ending: threading.Event) -> None:
    while not ending.wait(SAMPLE_S):
        with suppress(BatonError, httpx.HTTPError):  # the bootstrap service is being replaced
            census.sample()


def _attack(url: str, seed: int, ending: threading.Event, counts: Counter[str]) -> None:
    draw = random.Random(seed)
    while not ending.is_set():
        name = draw.choice(ATTACKS)
        counts[f"{name}: {_send(url, name) or 'no router'}"] += 1


def _send(url: str, name: str) -> str:
    """Carry out an attack. Return the status of the answer."""
    return subprocess.run(attack_command(url, name), capture_output=True, text=True, check=False).stdout[:3]


def _growth(census: Census, minutes: float) -> dict[str, dict[str, Any]]:
    """Return the memory growth of processes in the second half of the time; each attack first comes in the first."""
    found: dict[str, dict[str, Any]] = {}
    for series in census.series.values():
        slope = series.slope(warm_up_s=60 * minutes / 2, least_s=60 * minutes / 4)
        if slope is not None:
            found[series.name] = {"mib_a_minute": round(slope, 2), "least_mib": series.least_mib}
    return found


def _peaks(census: Census) -> dict[str, float]:
    """Return the peak memory of all processes with each name."""
    found: dict[str, float] = {}
    for series in census.series.values():
        found[series.name] = max(found.get(series.name, 0.0), *(round(mib, 1) for _, mib in series.points))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.endurance")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--calm", action="store_true")
    given = parser.parse_args()
    with running_cluster("deploy/local-cpu-2p2d.yaml", NAME, *SETTINGS) as cluster:
        result = measure(cluster, given)
    found = problems(result)
    print(json.dumps({**result, "problems": found}, indent=2))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
