"""Attention in bf16 by torch's own kernel, by blocks in torch and natively, alternately in one process with one thread.

Run as `python -m tests.bench.attention_speed`; a ratio of 2 means that half of torch's time is enough.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor

from tests.fakes.kv import kv_pool
from workers.attention.extend import extend
from workers.attention.paged import flash, gather_key_value, page_rows
from workers.attention.registry import load_backend
from workers.context_parallel.runs import Run
from workers.cpu import use_cpu
from workers.native.compile import CannotCompileError

ROUNDS = 5
PREFILL_LEN = 8192
PREFILL_SHAPES = ((4, 2, 64), (2, 4, 64), (2, 2, 128), (1, 4, 128))
"""KV heads, query heads a kv head, head dim."""
DECODE_LENS, DECODE_GROUPS = (8192, 32768), (1, 2, 4, 8)
DECODE_HEADS, DECODE_DIM, PAGE_SIZE, NUM_LAYERS = 2, 128, 64, 4

Calls = dict[str, Callable[[], object]]


def cpu_s(call: Callable[[], object]) -> float:
    """Time of this thread alone, since others share the machine."""
    start_s = time.thread_time()
    call()
    return time.thread_time() - start_s


def compare(rounds: Sequence[Calls], work: float, unit: str) -> str:
    """One line: work a nanosecond of every call, and how often it fits into the time of the first."""
    times_s = [{name: cpu_s(call) for name, call in calls.items()} for calls in rounds][1:]
    first = next(iter(times_s[0]))
    parts = []
    for name in times_s[0]:
        rate = work / median(times[name] for times in times_s) / 1e9
        parts.append(f"{name} {rate:5.1f} {unit} ({median(times[first] / times[name] for times in times_s):.2f})")
    return ", ".join(parts)


def prefill(kv_heads: int, groups: int, head_dim: int, with_native: bool) -> str:
    """A prompt of one request, all of it new."""
    query = torch.randn(PREFILL_LEN, kv_heads * groups, head_dim).bfloat16()
    key, value = torch.randn(2, kv_heads, PREFILL_LEN, head_dim).bfloat16()
    rows = [x.transpose(0, 1) for x in (key, value)]
    repeated = [x.repeat_interleave(groups, 0)[None] for x in (key, value)]
    calls: Calls = {
        "torch": lambda: flash(query.transpose(0, 1)[None], *repeated, causal=True),
        "blocked": lambda: extend(query, key, value, 0),
    }
    if with_native:
        run = [Run(0, 0, PREFILL_LEN, 1)]
        native = load_backend("native").prepare_rows(run, run)
        calls["native"] = lambda: native.attend(query, *rows)
    flops = 2 * kv_heads * groups * head_dim * PREFILL_LEN**2
    return compare([calls] * (ROUNDS + 1), flops, "GF/s")


def decode(num_keys: int, groups: int, with_native: bool) -> str:
    """One token of one request over pages in random order; ``read`` only sums as many bytes that lie in a row."""
    pool = kv_pool(num_keys // PAGE_SIZE, DECODE_HEADS, NUM_LAYERS, PAGE_SIZE, DECODE_DIM, torch.bfloat16)
    pool.group("full_attention").normal_()
    tables, runs = [torch.randperm(num_keys // PAGE_SIZE)], [Run(0, num_keys - 1, 1, 1)]
    query = torch.randn(1, DECODE_HEADS * groups, DECODE_DIM).bfloat16()
    steps = {
        name: load_backend(backend).prepare(runs, tables, PAGE_SIZE)
        for name, backend in (("blocked", "torch"), ("native", "native"))
        if with_native or backend == "torch"
    }
    flat = pool.group("full_attention").flatten().view(torch.int32)
    quarter = len(flat) // NUM_LAYERS

    def calls_of(layer: int) -> Calls:
        pages = pool.layer_view(layer)
        return {
            "torch": lambda: _flash_over_pages(query, tables[0], *pages),
            **{name: partial(step.attend, query, *pages) for name, step in steps.items()},
            "read": lambda: flat[layer * quarter : (layer + 1) * quarter].view(torch.float32).sum(),
        }

    rounds = [calls_of(number % NUM_LAYERS) for number in range(3 * NUM_LAYERS + 1)]
    return compare(rounds, 4 * DECODE_HEADS * DECODE_DIM * num_keys, "GB/s")


def _flash_over_pages(query: Tensor, table: Tensor, key_pages: Tensor, value_pages: Tensor) -> None:
    rows = page_rows(table[None], DECODE_HEADS)
    folded = query.view(1, DECODE_HEADS, -1, DECODE_DIM)
    flash(folded, *gather_key_value(rows, key_pages, value_pages))


def main() -> None:
    """Print one line a shape."""
    use_cpu(1)
    torch.manual_seed(0)
    try:
        with_native = bool(load_backend("native"))
    except CannotCompileError as error:
        with_native = False
        print(f"no native backend: {error}")
    for kv_heads, groups, head_dim in PREFILL_SHAPES:
        print(f"prefill {kv_heads * groups:2} query, {kv_heads} kv heads of {head_dim:3}:", end=" ", flush=True)
        print(prefill(kv_heads, groups, head_dim, with_native), flush=True)
    for num_keys in DECODE_LENS:
        for groups in DECODE_GROUPS:
            print(f"decode {num_keys:5} keys, {groups} queries a kv head:", end=" ", flush=True)
            print(decode(num_keys, groups, with_native), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
