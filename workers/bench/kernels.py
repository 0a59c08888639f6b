"""`baton bench kernels`: times of GPU kernels at the shapes of a model, compared with the limits of the device."""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from cluster.spec.config import Device
from cluster.spec.errors import UserError
from cluster.spec.kv import FULL_ATTENTION, KvGeometry, key_value_group, pages_for
from workers.attention.interface import AttentionParams, GraphShape
from workers.attention.runs import Run
from workers.attention.triton.backend import TritonAttention
from workers.attention.triton.decode import DecodeAttention
from workers.bench.device_limits import GpuTimer, Launch, gpu_limits
from workers.bench.fp8_kernels import fp8_cases
from workers.bench.kernel_case import DTYPE, NUM_EXPERTS, PAGE_SIZE, KernelCase, Sizes, random, rows_by_expert
from workers.bench.latent_kernels import latent_cases
from workers.bench.results import DeviceLimits, KernelResult, Limit
from workers.bench.shapes import LATENT_SHAPES, SHAPES, BenchShape
from workers.device import missing_gpu, open_device
from workers.kernels.experts import grouped_matmul, tiles_of
from workers.memory.page_pool import PagePool

_Batch = Sequence[tuple[int, int]]
"""Pairs of a number of requests and the length of each."""


class KernelBench:
    def __init__(self) -> None:
        """Open the GPU. Raises UserError if there is none."""
        if (missing := missing_gpu()) is not None:
            raise UserError(f"kernels need a GPU, but {missing}")
        gpu = open_device(Device.CUDA)
        self._device, self._has_fp8 = gpu.torch_device, gpu.multiplies_fp8
        self._timer = GpuTimer(self._device)
        self._limits = gpu_limits(self._device, self._timer)

    def close(self) -> None:
        """Do nothing. Everything is released when the process exits."""

    def limits(self) -> DeviceLimits:
        return self._limits

    def measure(self, model: str) -> list[KernelResult]:
        with torch.inference_mode():
            return [self._result(model, case) for case in self._cases(model)]

    def _cases(self, model: str) -> Iterator[KernelCase]:
        sizes = Sizes()
        if model in LATENT_SHAPES:
            return latent_cases(LATENT_SHAPES[model], sizes, self._device)
        shape = SHAPES[model]
        cases = kernel_cases(shape, sizes, self._device)
        if not self._has_fp8:
            return cases
        return chain(cases, fp8_cases(shape, self._device, few_rows=sizes.decode_rows, many_rows=sizes.prompt_len))

    def _result(self, model: str, case: KernelCase) -> KernelResult:
        seconds, *others = self._timer.medians([case.run, *case.peers.values()])
        by_peer = {name: other * 1e6 for name, other in zip(case.peers, others, strict=True)}
        return KernelResult(
            model=model,
            kernel=case.kernel,
            limit=case.limit,
            work=case.work,
            us=seconds * 1e6,
            share_of_limit=case.work / self._limits.rate(case.limit) / seconds,
            torch_us=by_peer.get("torch"),
            flash_attn_us=by_peer.get("flash_attn"),
        )


def kernel_cases(shape: BenchShape, sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    """Yield one kernel at a time, so that its memory is released before memory for the next one is allocated."""
    yield _prefill(shape, device, num_tokens=sizes.prompt_len, prefix_len=0)
    yield _prefill(shape, device, num_tokens=sizes.chunk_len, prefix_len=sizes.prefix_len)
    for batch in _decode_batches(shape, sizes):
        yield _decode(shape, device, batch=batch)
    yield _experts(shape, device, num=sizes.prompt_len)


def _prefill(shape: BenchShape, device: torch.device, *, num_tokens: int, prefix_len: int) -> KernelCase:
    total = prefix_len + num_tokens
    pool, table = _pages(shape, device, total)
    params = AttentionParams(shape.head_dim**-0.5)
    kv = params.key_and_value(pool.layer_view(0))
    query = random(device, num_tokens, shape.heads, shape.head_dim)
    run = Run(0, prefix_len, num_tokens, 1)
    step = TritonAttention().prepare([run], [table], PAGE_SIZE)
    key, value = random(device, 2, 1, total, shape.kv_heads, shape.head_dim)
    return KernelCase(
        f"prefill {num_tokens}" + (f" after {prefix_len}" if prefix_len else ""),
        Limit.FLOPS,
        4.0 * shape.heads * shape.head_dim * run.num_pairs,
        lambda: step.attend(query, *kv, params),
        _attention_peers([(query[None], key, value)], is_causal=True),
    )


def _decode_batches(shape: BenchShape, sizes: Sizes) -> list[_Batch]:
    request_bytes = sizes.decode_len * shape.kv_row_len * DTYPE.itemsize
    long = (1, sizes.long_len)
    return [
        [(max(1, sizes.decode_kv_bytes // request_bytes), sizes.decode_len)],
        [long],
        [(sizes.num_short, sizes.short_len), long],
    ]


def _decode(shape: BenchShape, device: torch.device, *, batch: _Batch) -> KernelCase:
    lens = [length for count, length in batch for _ in range(count)]
    num_pages = [pages_for(length, PAGE_SIZE) for length in lens]
    pool, pages = _pages(shape, device, sum(num_pages) * PAGE_SIZE)
    params = AttentionParams(shape.head_dim**-0.5)
    kv = params.key_and_value(pool.layer_view(0))
    query = random(device, len(lens), shape.heads, shape.head_dim)
    step = DecodeAttention(
        GraphShape(
            num_requests=len(lens),
            most_pages=max(num_pages),
            page_size=PAGE_SIZE,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            value_dim=shape.head_dim,
            dtype=query.dtype,
            device=pool.device,
        )
    )
    step.fill(lens, [table.numpy() for table in torch.split(pages.cpu(), num_pages)])
    contiguous = []
    for queries, (count, length) in zip(torch.split(query, [count for count, _ in batch]), batch, strict=True):
        key, value = random(device, 2, count, shape.kv_heads, length, shape.head_dim).transpose(2, 3)
        contiguous.append((queries[:, None], key, value))
    return KernelCase(
        "decode " + " + ".join(f"{count} x {length}" for count, length in batch),
        Limit.BYTES,
        float(sum(lens) * shape.kv_row_len * DTYPE.itemsize),
        lambda: step.attend(query, *kv, params),
        _attention_peers(contiguous, is_causal=False),
    )


def _attention_peers(batches: Sequence[tuple[Tensor, Tensor, Tensor]], *, is_causal: bool) -> dict[str, Launch]:
    """Return other implementations of attention over ``[request, token, head, D]``, with one call per batch.

    With ``is_causal``, the last query sees all keys.
    """
    peers: dict[str, Launch] = {"torch": lambda: [_sdpa(*batch, is_causal=is_causal) for batch in batches]}
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return peers
    return peers | {"flash_attn": lambda: [flash_attn_func(*batch, causal=is_causal) for batch in batches]}


def _sdpa(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask = causal_lower_right(q.shape[2], k.shape[2]) if is_causal else None
    return functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def _experts(shape: BenchShape, device: torch.device, *, num: int) -> KernelCase:
    x, weights = random(device, num, shape.hidden), random(device, NUM_EXPERTS, shape.inner, shape.hidden)
    tiles = tiles_of(rows_by_expert(num), x)
    work = 2.0 * num * shape.hidden * shape.inner
    return KernelCase(f"{NUM_EXPERTS} experts", Limit.FLOPS, work, lambda: grouped_matmul(x, weights, tiles))


def _pages(shape: BenchShape, device: torch.device, num_tokens: int) -> tuple[PagePool, Tensor]:
    """Return a pool, and all of its pages in random order."""
    num_pages = pages_for(num_tokens, PAGE_SIZE)
    dtype = str(DTYPE).removeprefix("torch.")
    group = key_value_group(range(1), shape.kv_heads, shape.head_dim, dtype)
    geometry = KvGeometry(model="bench", num_layers=1, groups=(group,), page_size=PAGE_SIZE)
    pool = PagePool.of_one_rank(geometry, num_pages, device)
    pool.group(FULL_ATTENTION).normal_()
    return pool, torch.randperm(num_pages, device=device)
