"""Random faults that overlap, in a cluster with two replicas per role under load."""

import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.cli.running import find_running
from tests.chaos.availability import BOOTSTRAP, ROUTER, Availability
from tests.chaos.faults import GONE, kill, state_of, stopped
from tests.chaos.one_way import cut, filtering
from tests.chaos.watch import RECOVERY_S
from tests.fakes.cluster import BATON, RunningCluster, listener_pid

MORTAL = ("prefill-1", "decode-1")
"""Replicas that are killed and restarted. The processes of the others run all the time, for observation, and so does
the router after its first start."""
REPLICAS = ("prefill-0", "decode-0", *MORTAL)
FIRST = "kill_router"
VICTIMS = {
    "kill_rank": MORTAL,
    "stop_rank": MORTAL,
    "stop_rank_briefly": REPLICAS,
    "slow_down_rank": REPLICAS,
    "cut_one_way": REPLICAS,
    "stop_router": (ROUTER,),
    "kill_bootstrap": (BOOTSTRAP,),
    "stop_bootstrap": (BOOTSTRAP,),
    "drain": REPLICAS,
    "restart": MORTAL,
}
"""Kinds of faults and their victims. Each source injects each kind once in random order, then each again."""
NUM_SOURCES = 3
PAUSE_S = (2.0, 15.0)
"""Pause of a source between two of its faults."""
BRIEF_S, LONG_S = (0.5, 4.0), (1.0, 16.0)
"""Durations of faults: too short for a replacement, and any."""
SLOW_S, SLOW_STOPPED_S, SLOW_RUNNING_S = 8.0, 0.3, 0.1
LAST_ONE = 0.2
"""Probability with which a fault is injected that leaves its role without a replica."""


class Faults:
    """Several sources of faults. A member has one fault at a time, but can have lost connections too."""

    def __init__(self, cluster: RunningCluster, name: str, seed: int, availability: Availability) -> None:
        self._cluster, self._name, self._seed, self._availability = cluster, name, seed, availability
        self._lock = threading.Lock()
        self._operator = threading.Lock()
        """Held during a command, because the driver refuses a second one."""
        self._victims: set[str] = set()
        self._begin_s = time.monotonic()
        self.counts: Counter[str] = Counter()
        """Number of faults by kind, and of those that could not be injected."""
        self.log: list[str] = []
        """Start, end and description of each."""

    def go_on(self, end_s: float) -> None:
        """Inject faults until a time, and wait until the cluster has recovered from the last ones."""
        draw = random.Random(self._seed)
        self._kill_router()
        self._wait_whole()
        sources = [
            threading.Thread(target=self._source, args=[random.Random(draw.random()), end_s], daemon=True)
            for _ in range(NUM_SOURCES)
        ]
        with filtering():
            for source in sources:
                source.start()
            for source in sources:
                source.join()
        self._wait_whole()

    def _wait_whole(self) -> None:
        self._cluster.wait_until(self._availability.is_whole, RECOVERY_S)

    def _kill_router(self) -> None:
        with self._availability.fault(ROUTER):
            kill(ROUTER, self._pid(ROUTER, random.Random()))
        self.counts[FIRST] += 1

    def _source(self, draw: random.Random, end_s: float) -> None:
        while True:
            for kind in draw.sample(list(VICTIMS), len(VICTIMS)):
                time.sleep(draw.uniform(*PAUSE_S))
                if time.monotonic() > end_s:
                    return
                self._inject(kind, draw)

    def _inject(self, kind: str, draw: random.Random) -> None:
        victim, start_s = draw.choice(VICTIMS[kind]), time.monotonic()
        inject: Callable[[str, random.Random], str | None] = getattr(self, f"_{kind}")
        counted = kind
        try:
            with self._claim(victim, draw):
                more = inject(victim, draw) or ""
        except (AssertionError, OSError) as error:  # among others, while the victim of another fault is being replaced
            counted, more = f"{kind} not done", f"not done: {error or type(error).__name__}"
        with self._lock:
            self.counts[counted] += 1
            since_s, until_s = start_s - self._begin_s, time.monotonic() - self._begin_s
            self.log.append(f"{since_s:.1f} to {until_s:.1f} s: {kind} {victim} {more}".rstrip())

    @contextmanager
    def _claim(self, victim: str, draw: random.Random) -> Iterator[None]:
        """Reserve a victim for one fault. Raises AssertionError if it must not have another one now."""
        with self._lock:
            assert victim not in self._victims, "it has another fault"
            assert not self._availability.is_last(victim) or draw.random() < LAST_ONE, "it is the last of its role"
            self._victims.add(victim)
        try:
            yield
        finally:
            with self._lock:
                self._victims.discard(victim)

    def _pid(self, member: str, draw: random.Random) -> int:
        """Return the process of a service or of a random rank."""
        if member == ROUTER:
            return listener_pid(self._cluster.url)
        if member == BOOTSTRAP:
            return listener_pid(str(find_running(self._name).bootstrap_url))
        return listener_pid(draw.choice(self._availability.addresses(member)))

    def _kill_rank(self, replica: str, draw: random.Random) -> None:
        with self._availability.fault(replica, is_fatal=True):
            kill(replica, self._pid(replica, draw))

    def _stop_rank(self, replica: str, draw: random.Random) -> None:
        with self._availability.fault(replica):
            self._stop(replica, draw, LONG_S)

    def _stop_rank_briefly(self, replica: str, draw: random.Random) -> None:
        with self._availability.fault(replica):
            self._stop(replica, draw, BRIEF_S)

    def _slow_down_rank(self, replica: str, draw: random.Random) -> None:
        """Let a rank run for a quarter of the time. It still counts as living."""
        pid, end_s = self._pid(replica, draw), time.monotonic() + SLOW_S
        while time.monotonic() < end_s and state_of(pid) != GONE:
            with stopped(replica, pid):
                time.sleep(SLOW_STOPPED_S)
            time.sleep(SLOW_RUNNING_S)

    def _cut_one_way(self, replica: str, draw: random.Random) -> str:
        """Lose all packets of one process to another, of which at least one belongs to a replica."""
        ends = [replica, draw.choice([ROUTER, BOOTSTRAP, *REPLICAS])]
        draw.shuffle(ends)
        with self._availability.cut(*ends), cut(*(self._pid(end, draw) for end in ends)) as num_connections:
            assert num_connections, f"no connection between {' and '.join(ends)}"
            time.sleep(draw.uniform(*LONG_S))
        return f"{num_connections} connections from {' to '.join(ends)}"

    def _stop_router(self, router: str, draw: random.Random) -> None:
        """Stop the router for less than the time after which it is replaced. It only delays its clients."""
        self._stop(router, draw, BRIEF_S)

    def _kill_bootstrap(self, bootstrap: str, draw: random.Random) -> None:
        kill(bootstrap, self._pid(bootstrap, draw))

    def _stop_bootstrap(self, bootstrap: str, draw: random.Random) -> None:
        self._stop(bootstrap, draw, LONG_S)

    def _stop(self, member: str, draw: random.Random, limits_s: tuple[float, float]) -> None:
        with stopped(member, self._pid(member, draw)):
            time.sleep(draw.uniform(*limits_s))

    def _drain(self, replica: str, draw: random.Random) -> None:
        with self._operator, self._availability.fault(replica):
            try:
                self._command("drain", replica)
                time.sleep(draw.uniform(*BRIEF_S))
            finally:  # a replica whose requests do not end in time stays drained
                self._command("resume", replica)

    def _restart(self, replica: str, _: random.Random) -> None:
        with self._operator, self._availability.fault(replica):
            self._command("restart", replica)

    def _command(self, *words: str) -> None:
        """Run a command. Raises AssertionError if the driver refuses it, such as while another one is in progress."""
        done = subprocess.run([*BATON, *words, "--cluster", self._name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr.strip().splitlines()[-1]
