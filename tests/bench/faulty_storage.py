"""How much storage that is slow and fails delays first tokens: python -m tests.bench.faulty_storage

Prompts come four at once: over storage of which every second call fails and every fourth takes two seconds, over one
that takes two seconds for every look and never fails, and over none. It ends with 1 and a reason where one of the
former is later by more than the prefetch policy lets a request wait, or where a request failed.
"""

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles

from cluster.spec.config import DeployConfig
from cluster.spec.errors import BatonError
from cluster.spec.sampling import Stopping
from cluster.spec.tiers import Tier
from tests.fakes.local_cluster import LocalCluster, Prompt
from workers.models.recall import build_recall_checkpoint
from workers.process import WORKER

FAULTY = "tests.fakes.faulty_storage:WorkerWithFaultyStorage"
SLOW = "tests.fakes.slow_storage:WorkerWithSlowStorage"
PROMPT_LEN, PREFIX_LEN, AT_ONCE, NUM_WARMUPS, NUM_TURNS = 2048, 1536, 4, 10, 300
PREFETCH_BASE_S, PREFETCH_S_PER_1K_TOKENS = 0.2, 0.05
NONE = "no storage"
LONGEST_S = PREFETCH_BASE_S + PREFETCH_S_PER_1K_TOKENS * PROMPT_LEN / 1000
"""The most that the policy lets a request wait."""


def config_of(folder: Path, backend: str) -> DeployConfig:
    storage = {
        "backend": backend,
        "folder": str(folder / "kv"),
        "prefetch_base_s": PREFETCH_BASE_S,
        "prefetch_s_per_1k_tokens": PREFETCH_S_PER_1K_TOKENS,
    }
    return DeployConfig.model_validate(
        {"kv": {"memory_gib": 0.05}, "hicache": {"host_gib": 0.05, "storage": storage if backend != "none" else {}}}
    )


@contextmanager
def running(worker: str, config: DeployConfig, model: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster(worker)
    try:
        cluster.load(config, model)
        with cluster.running():
            yield cluster
    finally:
        cluster.close()


def time_to_first_token(cluster: LocalCluster, prompts: list[Prompt]) -> float:
    """Of the slowest; any failure raises."""
    cluster.flush(Tier.DEVICE, Tier.HOST)
    start_s = time.monotonic()
    cluster.generate(prompts)
    return time.monotonic() - start_s


def prompts_of_turns() -> Iterator[list[Prompt]]:
    """Four for each turn, which begin as earlier ones did."""
    rng = random.Random(1)
    prefixes = [[rng.randrange(3, 250) for _ in range(PREFIX_LEN)] for _ in range(8)]
    for _ in range(NUM_WARMUPS + NUM_TURNS):
        starts = [rng.choice(prefixes) for _ in range(AT_ONCE)]
        ends = [[rng.randrange(3, 250) for _ in range(PROMPT_LEN - PREFIX_LEN)] for _ in starts]
        yield [Prompt([*start, *end], Stopping(max_tokens=1)) for start, end in zip(starts, ends, strict=True)]


def p99(seconds: list[float]) -> float:
    """Of a hundred and more."""
    return quantiles(seconds, n=100)[98]


def fault(times: dict[str, list[float]]) -> str:
    """Why this is not what the policy promises; empty where it is."""
    allowed_s = p99(times[NONE]) + LONGEST_S
    late = [f"{name}: p99 {p99(seconds) * 1e3:.0f} ms" for name, seconds in times.items() if p99(seconds) > allowed_s]
    return f"{', '.join(late)}; allowed: {allowed_s * 1e3:.0f} ms" if late else ""


def measure() -> dict[str, list[float]]:
    """Seconds to first tokens over each storage, by turns."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        build_recall_checkpoint(folder / "recall")
        ways = {NONE: (WORKER, "none"), "faulty storage": (FAULTY, "files"), "slow storage": (SLOW, "files")}
        clusters = {
            name: stack.enter_context(running(worker, config_of(folder / name, backend), folder / "recall"))
            for name, (worker, backend) in ways.items()
        }
        times: dict[str, list[float]] = {name: [] for name in clusters}
        for prompts in prompts_of_turns():
            for name, cluster in clusters.items():
                times[name].append(time_to_first_token(cluster, prompts))
    return {name: seconds[NUM_WARMUPS:] for name, seconds in times.items()}


def main() -> None:
    try:
        times = measure()
    except BatonError as error:
        raise SystemExit(f"a request failed: {error}") from error
    for name, seconds in times.items():
        print(f"{name}: median {median(seconds) * 1e3:.0f} ms, p99 {p99(seconds) * 1e3:.0f} ms")
    num_requests = sum(map(len, times.values())) * AT_ONCE
    print(f"a request waits {LONGEST_S * 1e3:.0f} ms at most for storage; none of {num_requests} failed")
    if reason := fault(times):
        raise SystemExit(reason)


if __name__ == "__main__":
    main()
