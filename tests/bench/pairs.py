"""Comparison of two running endpoints that take turns, so that a machine whose speed drifts slows both.

    python -m tests.bench.pairs URL_A URL_B [--loads 2048x64x1 512x16x8+16384] [--rounds 9]

A load is input tokens x output tokens x concurrent requests. With a prompt's tokens after a plus sign, the requests are
sent twice a second beside that prompt, and only they are counted. Both endpoints must serve a model with at least 4,096
tokens in its vocabulary. Prints one JSON object per load with the medians of both endpoints, and the median and the
quartiles of the ratio B / A of each round. The first round is not counted.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from statistics import median, quantiles
from typing import NamedTuple

import httpx

from cluster.bench.endpoint import first_model
from cluster.bench.load import complete, summarize
from cluster.bench.workload import PlannedRequest, random_workload

REST_S = 3.0
"""Pause before each turn, in which the other endpoint finishes what it does after its last answer. vLLM's threads still
take the cores of the next turn half a second later.
"""
GAP_S = 0.5
"""Time between requests beside a long prompt."""


class Load(NamedTuple):
    input_len: int
    output_len: int
    num_requests: int
    long_len: int = 0
    """Tokens of the prompt beside which the requests are sent; 0 if they are sent at the same time."""

    @classmethod
    def parse(cls, text: str) -> "Load":
        sizes, _, long_len = text.partition("+")
        input_len, output_len, num_requests = map(int, sizes.split("x"))
        return cls(input_len, output_len, num_requests, int(long_len or 0))


async def take_turn(url: str, model: str, load: Load, seed: int, *, is_greedy: bool) -> dict[str, float]:
    """Send one turn's requests. Every turn has prompts of its own."""
    requests = _requests(load.input_len, load.output_len, load.num_requests, seed)
    await asyncio.sleep(REST_S)
    async with httpx.AsyncClient(base_url=url, timeout=600.0) as client:
        others = [asyncio.create_task(complete(client, model, each)) for each in _requests(load.long_len, 1, 1, seed)]
        start_s = time.monotonic()
        tasks = []
        for request in requests:
            await asyncio.sleep(GAP_S if load.long_len else 0)
            tasks.append(asyncio.create_task(complete(client, model, request, is_greedy=is_greedy)))
        records = await asyncio.gather(*tasks)
        seconds = time.monotonic() - start_s
        long = await asyncio.gather(*others)
    report, errors = summarize(records), summarize([*records, *long]).errors
    assert report.ttft_ms is not None, f"{url}: {errors}"
    assert not errors, f"{url}: {errors}"
    figures = {"ttft_ms": report.ttft_ms.p50, "tokens_per_s": report.output_tokens / seconds}
    return figures | ({"tpot_ms": report.tpot_ms.p50} if load.output_len > 1 and report.tpot_ms else {})


def _requests(input_len: int, output_len: int, count: int, seed: int) -> Sequence[PlannedRequest]:
    """Return the last requests of a longer workload, or none without input."""
    if not input_len:
        return []
    options = {"input_len": input_len, "output_len": output_len, "concurrency": count}
    return random_workload(num_requests=(seed + 1) * count, **options).requests[-count:]


async def compare(
    urls: Sequence[str], models: Sequence[str], text: str, rounds: int, *, is_greedy: bool = True
) -> dict[str, object]:
    load = Load.parse(text)
    turns: list[list[dict[str, float]]] = []
    for number in range(rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)
        taken = {
            index: await take_turn(urls[index], models[index], load, number, is_greedy=is_greedy) for index in order
        }
        turns.append([taken[0], taken[1]])
    result: dict[str, object] = {"load": text, "rounds": rounds}
    for name in turns[0][0]:
        pairs = [(a[name], b[name]) for a, b in turns[1:]]
        ratios = [b / a for a, b in pairs]
        low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        a, b = (round(median(values), 2) for values in zip(*pairs, strict=True))
        result[name] = {"a": a, "b": b, "b/a": round(median(ratios), 3), "quartiles": [round(low, 3), round(high, 3)]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs=2, metavar="URL")
    parser.add_argument("--loads", nargs="+", default=["2048x64x1", "512x64x4"])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    models = []
    for url in args.urls:
        with httpx.Client(base_url=url) as client:
            models.append(first_model(client))
    for load in args.loads:
        print(json.dumps(asyncio.run(compare(args.urls, models, load, args.rounds))))


if __name__ == "__main__":
    main()
