"""Four times the load that a cluster can carry: who is let in must not wait long, the others must hear so at once.

baton up deploy/local-cpu.yaml --set prefill.max_queued_tokens=512 --set router.max_waiting_requests=0
python -m tests.bench.overload [--cluster NAME] [--seconds 60] [--factor 4]

One client alone gives the uncontended times, a closed loop the capacity, an open loop then ``factor`` times as much,
during which the memory of every process of the cluster is noted.
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from cluster.bench.load import complete, first_model
from cluster.bench.statistics import RequestRecord, quantiles_ms
from cluster.cli.running import find_running
from tests.chaos.census import Census

_ALONE, _CLOSED_S = 40, 15.0
_SAMPLE_S = 2.0


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Token ids that no other prompt begins with."""
    draw = random.Random(seed)
    return [draw.randrange(300, 4000) for _ in range(num_tokens)]


class Load:
    """Requests of one size."""

    def __init__(self, client: httpx.AsyncClient, model: str, args: argparse.Namespace) -> None:
        self._client, self._model, self._args = client, model, args
        self._num_asked = 0

    async def ask(self) -> RequestRecord:
        """One request."""
        self._num_asked += 1
        return await complete(
            self._client, self._model, prompt(self._args.input_len, self._num_asked), self._args.output_len
        )

    async def closed(self, concurrency: int, seconds: float) -> list[RequestRecord]:
        """So many clients, each with one request at a time."""
        end_s = time.monotonic() + seconds
        records: list[RequestRecord] = []

        async def client() -> None:
            while time.monotonic() < end_s:
                records.append(await self.ask())

        await asyncio.gather(*(client() for _ in range(concurrency)))
        return records

    async def open(self, rate: float, seconds: float) -> list[RequestRecord]:
        """Arrivals with this mean rate, whoever is answered."""
        rng, end_s = random.Random(0), time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            tasks = []
            while time.monotonic() < end_s:
                tasks.append(group.create_task(self.ask()))
                await asyncio.sleep(rng.expovariate(rate))
        return [task.result() for task in tasks]


def ttft_ms(records: list[RequestRecord]) -> dict[str, float]:
    """Median and tail of the time to first token of those that were answered."""
    quantiles = quantiles_ms([record.arrivals_s[0] - record.sent_s for record in records if record.error is None])
    assert quantiles is not None, "nobody was answered"
    return {"p50": round(quantiles.p50, 1), "p99": round(quantiles.p99, 1)}


@asynccontextmanager
async def watched(census: Census) -> AsyncIterator[None]:
    """Note the memory of the cluster's processes all the while."""

    async def watch() -> None:
        while True:
            await asyncio.to_thread(census.sample)
            await asyncio.sleep(_SAMPLE_S)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


def memory_mib(census: Census) -> dict[str, list[float]]:
    """Of every process: in the first, the middle and the last sample; pools are not counted."""
    found = {}
    for series in census.series.values():
        sizes = [mib for _, mib in series.points]
        found[series.name] = [round(size, 1) for size in (sizes[0], sizes[len(sizes) // 2], sizes[-1])]
    return found


async def measure(args: argparse.Namespace) -> dict[str, object]:
    """The three loads one after the other."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    census, url = Census(args.cluster), find_running(args.cluster).router_url or ""
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        load = Load(client, await first_model(client), args)
        await load.ask()
        alone = [await load.ask() for _ in range(_ALONE)]
        closed = await load.closed(args.concurrency, _CLOSED_S)
        capacity = sum(record.error is None for record in closed) / _CLOSED_S
        async with watched(census):
            flood = await load.open(args.factor * capacity, args.seconds)
    refused = Counter(record.error.partition(":")[0] for record in flood if record.error is not None)
    alone_ms, flood_ms = ttft_ms(alone), ttft_ms(flood)
    return {
        "capacity_per_s": round(capacity, 2),
        "asked": len(flood),
        "answered": len(flood) - refused.total(),
        "refused": dict(refused),
        "ttft_alone_ms": alone_ms,
        "ttft_contended_ms": ttft_ms(closed),
        "ttft_overload_ms": flood_ms,
        "p99_over_alone": round(flood_ms["p99"] / alone_ms["p99"], 2),
        "longest_request_s": round(max(record.ended_s - record.sent_s for record in flood), 2),
        "memory_mib": memory_mib(census),
    }


def main() -> None:
    """Measure once; prints one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", help="its name; without it the only one that runs on this machine")
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--factor", type=float, default=4.0, help="times the capacity")
    parser.add_argument("--concurrency", type=int, default=4, help="clients that find the capacity")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=16)
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
