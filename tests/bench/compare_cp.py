"""Time to first token of short prompts with CP ranks and without: two whole clusters, asked in turns.

.venv/bin/python -m tests.bench.compare_cp --prompt-len 64,128,256,512,1024 --rounds 50
"""

import argparse
import asyncio
import random
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import httpx

from tests.bench.compare_vllm import VOCAB_SIZE, first_token_s, make_model
from tests.bench.servers import Server, run_baton

DEPLOYS = {"cp=1": "deploy/local-cpu-cp1.yaml", "cp=2": "deploy/local-cpu.yaml"}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-len", default="64,128,256,512,1024")
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    lengths = sorted(int(length) for length in options.prompt_len.split(","))
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        model = make_model(Path(scratch) / "model", max_len=lengths[-1] + 1024)
        servers = [
            stack.enter_context(run_baton(deploy, model, Path(scratch), name=name, port=port))
            for port, (name, deploy) in enumerate(DEPLOYS.items(), 8761)
        ]
        asyncio.run(measure(servers, lengths, options.rounds))
    for length in lengths:
        alone, together = (server.ttft_s[length] for server in servers)
        ratios = [two_s / one_s for one_s, two_s in zip(alone, together, strict=True)]
        print(
            f"{length} tokens: cp=1 {statistics.median(alone) * 1e3:.1f} ms, cp=2 "
            f"{statistics.median(together) * 1e3:.1f} ms to the first token; "
            f"cp=2 / cp=1 {statistics.median(ratios):.2f}"
        )


async def measure(servers: list[Server], lengths: list[int], rounds: int) -> None:
    """Fill in the times; the first round is not counted."""
    async with httpx.AsyncClient(timeout=600) as client:
        for length in lengths:
            for number in range(rounds + 1):
                prompt = random.Random(f"{length} {number}").choices(range(300, VOCAB_SIZE), k=length)
                for server in servers if number % 2 else reversed(servers):
                    ttft_s = await first_token_s(client, server, prompt)
                    if number:
                        server.ttft_s.setdefault(length, []).append(ttft_s)


if __name__ == "__main__":
    main()
