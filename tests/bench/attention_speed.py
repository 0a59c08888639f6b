"""Attention in bf16 by torch's own kernel, by the torch backend and natively, alternately in one process and thread.

Run as `python -m tests.bench.attention_speed`; a ratio of 2 means that half of torch's time is enough.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor

from tests.fakes.kv import kv_pool
from workers.attention.params import AttentionParams
from workers.attention.registry import load_backend
from workers.attention.runs import Run
from workers.device import use_cpu
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
    repeated = [x.repeat_interleave(groups, 0)[None] for x in (key, value)]
    calls: Calls = {"torch": lambda: _torchs_own(query.transpose(0, 1)[None], *repeated, causal=True)}
    run, params = [Run(0, 0, PREFILL_LEN, 1)], AttentionParams(head_dim**-0.5)
    for name in _backends(with_native):
        attention = load_backend(name).prepare_rows(run, run)
        calls[f"{name} backend"] = partial(attention.attend, query, key.transpose(0, 1), value.transpose(0, 1), params)
    flops = 2 * kv_heads * groups * head_dim * PREFILL_LEN**2
    return compare([calls] * (ROUNDS + 1), flops, "GF/s")


def decode(num_keys: int, groups: int, with_native: bool) -> str:
    """One token of one request over pages in random order; ``read`` only sums as many bytes that lie in a row."""
    pool = kv_pool(num_keys // PAGE_SIZE, DECODE_HEADS, NUM_LAYERS, PAGE_SIZE, DECODE_DIM, torch.bfloat16)
    pool.group("full_attention").normal_()
    tables, runs = [torch.randperm(num_keys // PAGE_SIZE)], [Run(0, num_keys - 1, 1, 1)]
    query = torch.randn(1, DECODE_HEADS * groups, DECODE_DIM).bfloat16()
    params = AttentionParams(DECODE_DIM**-0.5)
    steps = {name: load_backend(name).prepare(runs, tables, PAGE_SIZE) for name in _backends(with_native)}
    flat = pool.group("full_attention").flatten().view(torch.int32)
    quarter = len(flat) // NUM_LAYERS

    def calls_of(layer: int) -> Calls:
        pages = pool.layer_view(layer)
        return {
            "torch": lambda: _torchs_own_over_pages(query, tables[0], *pages),
            **{f"{name} backend": partial(step.attend, query, *pages, params) for name, step in steps.items()},
            "read": lambda: flat[layer * quarter : (layer + 1) * quarter].view(torch.float32).sum(),
        }

    rounds = [calls_of(number % NUM_LAYERS) for number in range(3 * NUM_LAYERS + 1)]
    return compare(rounds, 4 * DECODE_HEADS * DECODE_DIM * num_keys, "GB/s")


def _backends(with_native: bool) -> list[str]:
    return ["torch", "native"] if with_native else ["torch"]


def _torchs_own_over_pages(query: Tensor, table: Tensor, key_pages: Tensor, value_pages: Tensor) -> None:
    folded = query.view(1, DECODE_HEADS, -1, DECODE_DIM)
    kv = (pages.transpose(0, 1).index_select(1, table).flatten(1, 2)[None] for pages in (key_pages, value_pages))
    _torchs_own(folded, *kv)


def _torchs_own(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False) -> None:
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)


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
