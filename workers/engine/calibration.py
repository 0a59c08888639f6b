"""Measurement of a rank's speed during warm-up, in a fraction of a second, with one layer and scratch memory."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor, nn

from cluster.spec.kv import pages_for
from cluster.spec.ranks import moe_tp_size
from cluster.spec.worker_spec import WorkerSpec
from workers.attention.interface import AttentionBackend, AttentionParams
from workers.attention.merge import Partial, merge_into
from workers.attention.runs import Run
from workers.context_parallel.chunk_sizes import slowest
from workers.context_parallel.cost_model import ModelShape, Rates, computed_pairs
from workers.device import SAMPLE_S, Device
from workers.engine.rank_groups import RankGroups
from workers.layers.attention import AttentionContext, Expand
from workers.memory.page_pool import PagePool
from workers.models.decoder import DecoderModel, Residual
from workers.models.interface import LayerCost
from workers.parallel.communicator import Communicator
from workers.parallel.store import ReplicaStore, exchange_at_start

_REPEATS = 5
_SHORT_RUNS = 8
_PAUSES = 3
"""Duration of the work that overlaps with a collective, as a multiple of the collective's time."""
_CHOICES_PER_EXPERT = 4
"""Minimum number of tokens per expert in a measurement, so that nearly every expert has some."""
_FALLBACK = Rates()


def calibrate(
    model: DecoderModel, pool: PagePool, backend: AttentionBackend, group: Communicator, shape: ModelShape
) -> Rates:
    """Measure this rank's rates. Every rank of the replica calls this before any request. Only the null page is
    written.

    Rates that noise makes zero or negative keep their defaults.
    """
    with torch.inference_mode(), model.device.torch_device:
        all_reduce_s, all_reduce_row_s = _measure_all_reduce(model)
        exchange_s, exchange_bytes_per_s, hidden_share = _measure_exchange(model, pool, group)
    # Each rank decides alone how often to repeat the other measurements, so they must not contain collectives.
    with torch.inference_mode(), model.device.torch_device, model.groups.alone():
        floor_s, linear_flops_per_s = _measure_linear(model)
        run_s, attention_flops_per_s = _measure_attention(model, pool, backend)
        head_s = model.device.least_s(lambda: model.logits(_hidden(model, 1))) if model.is_last else 0.0
        row_s, merge_row_s = _measure_store(model, pool), _measure_merge(model)
    return Rates(
        step_s=shape.num_layers * floor_s + head_s,
        linear_flops_per_s=linear_flops_per_s,
        attention_flops_per_s=attention_flops_per_s,
        run_s=run_s,
        row_s=row_s,
        merge_row_s=merge_row_s,
        exchange_s=exchange_s,
        exchange_bytes_per_s=exchange_bytes_per_s,
        hidden_share=hidden_share,
        all_reduce_s=all_reduce_s,
        all_reduce_row_s=all_reduce_row_s,
    )


class _NoAttention(AttentionContext):
    """Context without attention, for measuring the linear part of a layer."""

    def __init__(self, value_dim: int) -> None:
        self._value_dim = value_dim

    def put(self, layer: int, *parts: Tensor) -> None:
        """Store nothing."""

    def attend(self, layer: int, q: Tensor, params: AttentionParams, expand: Expand | None = None) -> Tensor:  # noqa: ARG002
        return q[..., : self._value_dim]


def _measure_linear(model: DecoderModel) -> tuple[float, float]:
    """Measure one layer's time with few tokens, and its FLOP/s with more tokens."""
    layer, cost = sampled_layer(model)
    flops = alone_flops(model, cost)
    context = _NoAttention(model.attention.value_dim)

    def layer_s(num_tokens: int) -> float:
        hidden = _hidden(model, num_tokens)
        rotation = model.rotary(torch.arange(num_tokens, device=model.device.torch_device), model.dtype)
        return model.device.least_s(lambda: layer(Residual(hidden, hidden), rotation, context, None))

    few_tokens, most_tokens = model.device.samples.tokens
    if (moe := model.config.moe) is not None:
        few_tokens = max(few_tokens, _CHOICES_PER_EXPERT * moe.num_experts // moe.top_k)
    few_s, many_s, num_tokens = layer_s(few_tokens), 0.0, few_tokens
    while num_tokens == few_tokens or (num_tokens < most_tokens and many_s < SAMPLE_S):
        num_tokens *= 4
        many_s = layer_s(num_tokens)
    flops_per_s = _rate((num_tokens - few_tokens) * flops, many_s - few_s, _FALLBACK.linear_flops_per_s)
    return max(0.0, few_s - few_tokens * flops / flops_per_s), flops_per_s


def sampled_layer(model: DecoderModel) -> tuple[nn.Module, LayerCost]:
    """Return the rank's first layer with experts, or its first layer if none has any."""
    layers = list(zip(model.layers.values(), model.config.layer_costs, strict=True))
    return next((layer for layer in layers if layer[1].experts), layers[0])


def alone_flops(model: DecoderModel, layer: LayerCost) -> float:
    """Return FLOPs per token in a layer, including only the rank's shard of the MLP and the experts."""
    parallel = model.groups.parallel
    routed = layer.routed * parallel.tp / (parallel.ep * moe_tp_size(parallel))
    return 2 * (layer.queries + layer.kv + layer.whole + layer.dense / parallel.dp + routed)


def _measure_attention(model: DecoderModel, pool: PagePool, backend: AttentionBackend) -> tuple[float, float]:
    """Measure the time of a minimal run, and the FLOP/s of a run with a long prefix."""
    samples, attention = model.device.samples, model.attention
    # The FLOPs below include all keys.
    params = replace(attention.params, window=None)
    table = torch.full((pages_for(samples.prefix + samples.queries, pool.page_size),), pool.num_pages)

    def runs_s(runs: Sequence[Run]) -> float:
        step = backend.prepare(runs, [table] * len(runs), pool.page_size)
        num_queries = sum(run.count for run in runs)
        query = torch.zeros(num_queries, attention.num_heads, attention.query_dim, dtype=model.dtype)
        kv = params.key_and_value(pool.layer_view(0))
        return model.device.least_s(lambda: step.attend(query, *kv, params))

    run_s = runs_s([Run(request, 0, 2, 1) for request in range(_SHORT_RUNS)]) / _SHORT_RUNS
    long = Run(0, samples.prefix, samples.queries, 1)
    flops = computed_pairs(long) * attention.pair_flops
    return run_s, _rate(flops, runs_s([long]) - run_s, _FALLBACK.attention_flops_per_s)


def _measure_exchange(model: DecoderModel, pool: PagePool, group: Communicator) -> tuple[float, float, float]:
    """Measure a collective's latency, the bytes received per second, and the fraction of time hidden by other work."""
    if group.size == 1:
        return 0.0, _FALLBACK.exchange_bytes_per_s, _FALLBACK.hidden_share

    def gather_s(num_rows: int, pause_s: float = 0.0) -> float:
        send = torch.zeros(num_rows, *pool.row_shape(0), dtype=model.dtype)
        receive = torch.zeros(group.size * num_rows, *pool.row_shape(0), dtype=model.dtype)

        def exchange() -> None:
            pending = group.start_all_gather(receive, send)
            time.sleep(pause_s)
            pending.wait()

        return min(_waited_s(model.device, group, exchange) for _ in range(_REPEATS))

    few_rows, many_rows = model.device.samples.rows
    few_s, many_s = gather_s(few_rows), gather_s(many_rows)
    # Layers of a model can have rows of different sizes.
    row_bytes = math.prod(pool.row_shape(0)) * model.dtype.itemsize
    received = (group.size - 1) * (many_rows - few_rows) * row_bytes
    bytes_per_s = _rate(received, many_s - few_s, _FALLBACK.exchange_bytes_per_s)
    if not group.in_background:
        return few_s, bytes_per_s, 0.0
    if model.device.is_asynchronous:
        # Collectives run on a separate stream.
        return few_s, bytes_per_s, 1.0
    hidden_s = many_s - gather_s(many_rows, pause_s=_PAUSES * many_s)
    return few_s, bytes_per_s, min(max(hidden_s / many_s, 0.0), 1.0)


def _measure_all_reduce(model: DecoderModel) -> tuple[float, float]:
    """Measure the time in seconds to sum hidden states over the TP ranks: the fixed part, and the part per token."""
    group = model.groups.tp
    if group.size == 1:
        return 0.0, 0.0

    def sum_s(num_rows: int) -> float:
        hidden = torch.zeros(num_rows, model.config.hidden_size, dtype=model.dtype)
        return min(_waited_s(model.device, group, lambda: group.all_reduce(hidden)) for _ in range(_REPEATS))

    few_rows, many_rows = model.device.samples.rows
    few_s, many_s = sum_s(few_rows), sum_s(many_rows)
    return few_s, max(0.0, many_s - few_s) / (many_rows - few_rows)


def _waited_s(device: Device, group: Communicator, call: Callable[[], object]) -> float:
    """Return a call's time in a group's collectives or, on a GPU, its total time. Ranks make the call together."""
    group.barrier()
    waited_before_s, start_s = group.waited_s, device.now_s()
    call()
    return device.now_s() - start_s if device.is_asynchronous else group.waited_s - waited_before_s


def _measure_merge(model: DecoderModel) -> float:
    _, num_tokens = model.device.samples.tokens
    shape = (num_tokens, model.attention.num_heads)
    found = Partial(torch.zeros(*shape, model.attention.value_dim, dtype=model.dtype), torch.zeros(shape))
    joined = Partial(found.out.float(), torch.zeros(shape))
    return model.device.least_s(lambda: merge_into(joined, found)) / num_tokens


def _measure_store(model: DecoderModel, pool: PagePool) -> float:
    _, num_tokens = model.device.samples.tokens
    slots = torch.full((num_tokens,), pool.null_slot)
    kv = torch.zeros(num_tokens, *pool.row_shape(0), dtype=model.dtype)
    return model.device.least_s(lambda: pool.write(0, slots, kv)) / num_tokens


def _hidden(model: DecoderModel, num_tokens: int) -> Tensor:
    """Return hidden states of different tokens, which are routed to different experts."""
    generator = torch.Generator(device=model.device.torch_device).manual_seed(0)
    shape = num_tokens, model.config.hidden_size
    return torch.randn(shape, generator=generator, device=model.device.torch_device).to(model.dtype)


def _rate(work: float, seconds: float, fallback: float) -> float:
    return work / seconds if seconds > 0 else fallback


def measured_rates(
    spec: WorkerSpec,
    store: ReplicaStore,
    model: DecoderModel,
    pool: PagePool,
    backend: AttentionBackend,
    groups: RankGroups,
    dtype: str,
) -> tuple[ModelShape, Rates]:
    """Return the rates of the slowest rank over all stages and DP ranks. Every rank calls this."""
    shape = shape_of(model, dtype)
    rates = calibrate(model, pool, backend, groups.cp, shape)
    word = msgspec.json.encode((shape, rates)).decode()
    words = exchange_at_start(store, "rates", spec.global_rank, spec.world_size, word)
    measured = [msgspec.json.decode(word, type=tuple[ModelShape, Rates]) for word in words]
    return slowest(measured, spec.sizes.cp, spec.pool.chunk_tokens)


def shape_of(model: DecoderModel, dtype: str) -> ModelShape:
    """Return a rank's share of the model's work, as its groups divide it."""
    groups = model.groups
    experts = model.config.expert_exchange(
        groups.parallel,
        dtype,
        groups.moe_dispatch,
        waits_for_counts=model.device.has_kernels,
        in_background=groups.moe_block.in_background,
    )
    return model.config.cost(dtype, groups.linear_shards, experts)
