"""Random faults in a cluster with two replicas per role under load."""

import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator

from cluster.cli.running import find_running
from tests.chaos.faults import kill, stopped
from tests.chaos.rest import if_answered
from tests.chaos.watch import RECOVERY_S, pid_of
from tests.fakes.cluster import BATON, RunningCluster, listener_pid

PAUSE_S = (5.0, 25.0)
"""Pause between one recovery and the next fault."""
MORTAL = ("prefill-1", "decode-1")
"""Replicas that are killed. Other members keep running for observation, except the router's first start."""
STOPPED_S = 8.0
FIRST = "kill_router"
KINDS = ("kill_rank", "stop_rank", "stop_router", "kill_bootstrap", "drain", "restart")
"""Kinds of faults. Each occurs once in random order, then each occurs again."""


class Faults:
    """Random faults, each injected after the cluster has recovered from the preceding one."""

    def __init__(self, cluster: RunningCluster, name: str, seed: int) -> None:
        self._cluster, self._name, self._draw = cluster, name, random.Random(seed)
        self.counts: Counter[str] = Counter()
        """Number of faults by kind, and of skipped ones by reason."""

    def go_on(self, end_s: float) -> None:
        """Inject faults until a time."""
        for kind in self._kinds():
            if time.monotonic() > end_s:
                return
            why_not = getattr(self, f"_{kind}")()
            self.counts[f"{kind} not done: {why_not}" if why_not else kind] += 1
            self._cluster.wait_until(if_answered(self._is_whole), RECOVERY_S)
            time.sleep(max(0.0, min(self._draw.uniform(*PAUSE_S), end_s - time.monotonic())))
            if not if_answered(self._is_whole)():
                self.counts["not whole after a pause"] += 1
                self._cluster.wait_until(if_answered(self._is_whole), RECOVERY_S)

    def _kinds(self) -> Iterator[str]:
        yield FIRST
        while True:
            yield from self._draw.sample(KINDS, len(KINDS))

    def _is_whole(self) -> bool:
        replicas = self._cluster.replicas()
        return len(replicas) == 4 and all(entry["ready"] for entry in replicas.values())

    def _rank(self) -> tuple[str, int]:
        """Return the name and process id of a rank that may be killed."""
        replica = self._draw.choice(MORTAL)
        rank = self._draw.randrange(len(self._cluster.replicas()[replica]["ranks"]))
        return f"{replica} rank {rank}", pid_of(self._cluster, replica, rank)

    def _kill_rank(self) -> None:
        kill(*self._rank())

    def _stop_rank(self) -> None:
        with stopped(*self._rank()):
            time.sleep(self._draw.uniform(1.0, 2 * STOPPED_S))

    def _kill_router(self) -> None:
        kill("router", listener_pid(self._cluster.url))

    def _stop_router(self) -> None:
        """Stop the router for less than the time after which it is replaced."""
        with stopped("router", listener_pid(self._cluster.url)):
            time.sleep(self._draw.uniform(0.5, STOPPED_S / 2))

    def _kill_bootstrap(self) -> None:
        kill("bootstrap", listener_pid(str(find_running(self._name).bootstrap_url)))

    def _drain(self) -> str:
        replica = self._draw.choice(["prefill-0", "decode-0", *MORTAL])
        return self._order("drain", replica) or self._order("resume", replica)

    def _restart(self) -> str:
        return self._order("restart", self._draw.choice(MORTAL))

    def _order(self, *words: str) -> str:
        """Return why the driver refused a command, if it did. It may not yet know that a replica is ready again."""
        done = subprocess.run([*BATON, *words, "--cluster", self._name], capture_output=True, text=True, check=False)
        return done.stderr.strip().splitlines()[-1] if done.returncode else ""
