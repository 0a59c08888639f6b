"""Comparison of two running endpoints that take turns, so that a machine whose speed drifts slows both.

    python -m tests.bench.pairs URL_A URL_B [--loads 2048x64x1 512x64x4] [--rounds 9]

A load is input tokens x output tokens x concurrent requests. Both endpoints must serve a model with at least 4,096
tokens in its vocabulary. Prints one JSON object per load with the medians of both endpoints, and the median and the
quartiles of the ratio B / A of each round. The first round is not counted.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from statistics import median, quantiles

import httpx

from cluster.bench.endpoint import first_model
from cluster.bench.load import complete, summarize
from cluster.bench.workload import random_workload

REST_S = 3.0
"""Pause before each turn, in which the other endpoint finishes what it does after its last answer. vLLM's threads still
take the cores of the next turn half a second later.
"""


async def take_turn(url: str, model: str, load: Sequence[int], seed: int) -> dict[str, float]:
    """Send one turn's requests at the same time."""
    input_len, output_len, concurrency = load
    # Every turn has its own prompts: the last requests of a longer workload.
    workload = random_workload(
        num_requests=(seed + 1) * concurrency, input_len=input_len, output_len=output_len, concurrency=concurrency
    )
    await asyncio.sleep(REST_S)
    async with httpx.AsyncClient(base_url=url, timeout=600.0) as client:
        start_s = time.monotonic()
        records = await asyncio.gather(
            *(complete(client, model, request) for request in workload.requests[-concurrency:])
        )
        seconds = time.monotonic() - start_s
    report = summarize(records)
    assert report.ttft_ms is not None, f"{url}: {report.errors}"
    assert not report.errors, f"{url}: {report.errors}"
    figures = {"ttft_ms": report.ttft_ms.p50, "tokens_per_s": report.output_tokens / seconds}
    return figures | ({"tpot_ms": report.tpot_ms.p50} if output_len > 1 and report.tpot_ms else {})


async def compare(urls: Sequence[str], models: Sequence[str], load: Sequence[int], rounds: int) -> dict[str, object]:
    turns: list[list[dict[str, float]]] = []
    for number in range(rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)
        taken = {index: await take_turn(urls[index], models[index], load, number) for index in order}
        turns.append([taken[0], taken[1]])
    result: dict[str, object] = {"load": "x".join(map(str, load)), "rounds": rounds}
    for name in turns[0][0]:
        pairs = [(a[name], b[name]) for a, b in turns[1:]]
        ratios = [b / a for a, b in pairs]
        low, _, high = quantiles(ratios, n=4)
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
        print(json.dumps(asyncio.run(compare(args.urls, models, [int(n) for n in load.split("x")], args.rounds))))


if __name__ == "__main__":
    main()
