"""One long prompt beside a stream of short ones on a running cluster; prints a table row of both latencies.

baton up deploy/local-cpu.yaml [--set prefill.oldest_share=1.0]
python -m tests.bench.long_and_short [--url http://127.0.0.1:8000] [--long 65536] [--short 512] [--every-s 0.5]
"""

import argparse
import asyncio
import random

import httpx

from cluster.bench.load import complete, first_model
from cluster.bench.statistics import RequestRecord, quantiles_ms

OUTPUT_LEN = 1


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Token ids that no other prompt begins with."""
    draw = random.Random(seed)
    return [draw.randrange(10, 4000) for _ in range(num_tokens)]


async def measure(args: argparse.Namespace) -> tuple[RequestRecord, list[RequestRecord]]:
    """The long request's record, and those of the short ones sent while it had no token."""
    async with httpx.AsyncClient(base_url=args.url, timeout=600) as client, asyncio.TaskGroup() as group:
        model = await first_model(client)
        await complete(client, model, prompt(args.short, 0), OUTPUT_LEN)
        long = group.create_task(complete(client, model, prompt(args.long, 1), OUTPUT_LEN))
        shorts: list[asyncio.Task[RequestRecord]] = []
        while not (await asyncio.wait([long], timeout=args.every_s))[0]:
            shorts.append(group.create_task(complete(client, model, prompt(args.short, 2 + len(shorts)), OUTPUT_LEN)))
    return long.result(), [short.result() for short in shorts]


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--long", type=int, default=65536, help="tokens of the long prompt")
    parser.add_argument("--short", type=int, default=512, help="tokens of each short prompt")
    parser.add_argument("--every-s", type=float, default=0.5, help="seconds between two short prompts")
    long, shorts = asyncio.run(measure(parser.parse_args()))
    if error := next((record.error for record in (long, *shorts) if record.error), None):
        raise SystemExit(error)
    short_ms = quantiles_ms([record.arrivals_s[0] - record.sent_s for record in shorts])
    assert short_ms is not None, "the long prompt ended before a short one was sent"
    print(
        f"| {long.arrivals_s[0] - long.sent_s:.1f} s | {short_ms.p50 / 1e3:.2f} s | {short_ms.p90 / 1e3:.2f} s | "
        f"{short_ms.p99 / 1e3:.2f} s | {len(shorts)} |"
    )


if __name__ == "__main__":
    main()
