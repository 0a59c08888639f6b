"""Faults drawn at random for a cluster of two replicas of each role that serves meanwhile."""

import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable

from cluster.cli.running import find_running
from tests.chaos.faults import kill, stopped
from tests.chaos.watch import RECOVERY_S, if_answered, pid_of
from tests.fakes.cluster import BATON, RunningCluster, listener_pid

PAUSE_S = (5.0, 25.0)
"""Between one recovery and the next fault."""
MORTAL = ("prefill-1", "decode-1")
"""Replicas that are killed. The others, the driver, and the router after its first end live on, to be watched."""
STOPPED_S = 8.0


class Faults:
    """Random ones, one after the other, each when the one before is mended."""

    def __init__(self, cluster: RunningCluster, name: str, seed: int) -> None:
        self._cluster, self._name, self._draw = cluster, name, random.Random(seed)
        self._kinds: list[Callable[[], None]] = [
            self._kill_rank, self._stop_rank, self._stop_router, self._kill_bootstrap, self._drain, self._restart,
        ]  # fmt: skip
        self.counts: Counter[str] = Counter()

    def go_on(self, end_s: float) -> None:
        """Until then."""
        next_one: Callable[[], None] = self._kill_router
        while time.monotonic() < end_s:
            next_one()
            self.counts[next_one.__name__.lstrip("_")] += 1
            self._cluster.wait_until(if_answered(self._is_whole), RECOVERY_S)
            time.sleep(max(0.0, min(self._draw.uniform(*PAUSE_S), end_s - time.monotonic())))
            next_one = self._draw.choice(self._kinds)

    def _is_whole(self) -> bool:
        replicas = self._cluster.replicas()
        return len(replicas) == 4 and all(entry["ready"] for entry in replicas.values())

    def _rank(self) -> tuple[str, int]:
        """The process of a rank that may die."""
        replica = self._draw.choice(MORTAL)
        rank = self._draw.randrange(len(self._cluster.replicas()[replica]["rows"]))
        return f"{replica} rank {rank}", pid_of(self._cluster, replica, rank)

    def _kill_rank(self) -> None:
        kill(*self._rank())

    def _stop_rank(self) -> None:
        with stopped(*self._rank()):
            time.sleep(self._draw.uniform(1.0, 2 * STOPPED_S))

    def _kill_router(self) -> None:
        kill("router", listener_pid(self._cluster.url))

    def _stop_router(self) -> None:
        """Not for so long that it is replaced."""
        with stopped("router", listener_pid(self._cluster.url)):
            time.sleep(self._draw.uniform(0.5, STOPPED_S / 2))

    def _kill_bootstrap(self) -> None:
        kill("bootstrap", listener_pid(str(find_running(self._name).bootstrap_url)))

    def _drain(self) -> None:
        replica = self._draw.choice(["prefill-0", "decode-0", *MORTAL])
        self._order("drain", replica)
        self._order("resume", replica)

    def _restart(self) -> None:
        self._order("restart", self._draw.choice(MORTAL))

    def _order(self, *words: str) -> None:
        """The driver may refuse it, where a replica that is ready again is not yet taken for running."""
        done = subprocess.run([*BATON, *words, "--cluster", self._name], capture_output=True, text=True, check=False)
        if done.returncode:
            self.counts[f"{words[0]} not done: {done.stderr.strip().splitlines()[-1]}"] += 1
