"""Prefill attention in bf16 against torch's own kernel, alternately in one process with one thread.

Run as `python -m tests.bench.attention_speed`; a ratio of 2 means that half of the time is enough.
"""

import time
from collections.abc import Callable
from statistics import median

import torch

from workers.attention.extend import extend
from workers.attention.paged import flash

NUM_TOKENS, ROUNDS = 8192, 5
SHAPES = ((4, 2, 64), (2, 4, 64), (2, 2, 128), (1, 4, 128))
"""KV heads, query heads a kv head, head dim."""


def cpu_s(call: Callable[[], object]) -> float:
    """Time of this thread alone, since others share the machine."""
    start_s = time.thread_time()
    call()
    return time.thread_time() - start_s


def compare(kv_heads: int, groups: int, head_dim: int) -> str:
    """One line of output for one shape."""
    torch.manual_seed(0)
    query = torch.randn(NUM_TOKENS, kv_heads * groups, head_dim).bfloat16()
    key, value = torch.randn(2, kv_heads, NUM_TOKENS, head_dim).bfloat16()
    folded = query.transpose(0, 1)[None]
    repeated = [x.repeat_interleave(groups, 0)[None] for x in (key, value)]
    times_s = [
        (cpu_s(lambda: flash(folded, *repeated, causal=True)), cpu_s(lambda: extend(query, key, value, 0)))
        for _ in range(ROUNDS + 1)
    ][1:]
    flops = 2 * kv_heads * groups * head_dim * NUM_TOKENS**2
    torch_s, our_s = (median(column) for column in zip(*times_s, strict=True))
    ratio = median(theirs / ours for theirs, ours in times_s)
    return (
        f"{kv_heads * groups:2} query, {kv_heads} kv heads of {head_dim:3}: torch {flops / torch_s / 1e9:5.1f} GF/s, "
        f"ours {flops / our_s / 1e9:5.1f} GF/s, ratio {ratio:.2f}"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        for shape in SHAPES:
            print(compare(*shape), flush=True)
