"""Small steps at startup, so that libraries, groups and kernels are ready for the first request."""

from dataclasses import replace
from itertools import product

import torch

from cluster.spec.kv import pages_for
from workers.attention.merge import Partial, merge_in_turn
from workers.attention.runs import Run
from workers.engine.runner import ModelRunner
from workers.layers.attention_config import LatentAttentionConfig
from workers.layers.latent_attention import LatentHeads
from workers.memory.copy import warm_up_copies

KERNEL_STEPS = [*product((1 << power for power in range(8)), (0, 1024)), (512, 0)]
"""Steps, as (tokens per CP rank, prefix tokens), that compile every attention kernel on a GPU: with every block size,
with and without partials, and after a prefix or over an equal number of rows from other ranks.
"""
_SELECTING_STEPS = [(1, 1 << 15), (1 << 8, 1 << 15)]
"""Steps that compile the kernels for selected keys: of few and of many queries, with more keys than one program chooses
from and than are scored at a time.
"""


def warm_up(runner: ModelRunner) -> None:
    """Run small steps in the null page. Every rank of the replica calls this."""
    model, cp = runner.model, runner.groups.cp.size
    steps = KERNEL_STEPS if model.device.has_kernels else [(1, 0)]
    for num_tokens, prefix_len in steps:
        runner.run_dummy(cp * num_tokens, prefix_len)
    if not model.device.has_kernels:
        return
    for num_tokens, prefix_len in _SELECTING_STEPS if model.config.selects_keys else ():
        runner.run_dummy(cp * num_tokens, prefix_len)
    with torch.inference_mode():
        _attend(runner)
    merge_dummy(runner)
    runner.sample_dummy(1)
    warm_up_copies(runner.pool)


def _attend(runner: ModelRunner) -> None:
    """Attend to keys in pages and in rows, and to expanded latents, in every size of blocks.

    A step uses the kernels of its strategy and its mix of extends, of which there are more than dummy steps.
    """
    model, pool, backend = runner.model, runner.pool, runner.backend
    shape, params = model.attention, model.attention.params
    heads = next((module for module in model.modules() if isinstance(module, LatentHeads)), None)
    for num_queries, prefix_len in KERNEL_STEPS:
        num_keys = prefix_len + num_queries
        rows = torch.zeros(num_keys, *pool.row_shape(0), dtype=model.dtype, device=model.device.torch_device)
        table = rows.new_full((pages_for(num_keys, pool.page_size),), pool.num_pages, dtype=torch.int64)
        query = rows.new_zeros(num_queries, shape.num_heads, shape.query_dim)
        runs, key_runs = [Run(0, prefix_len, num_queries, 1)], [Run(0, 0, num_keys, 1)]
        paged = backend.prepare(runs, [table], pool.page_size)
        paged.attend(query, *params.key_and_value(pool.layer_view(0)), params)
        if runner.groups.cp.size > 1:
            attention = backend.prepare_rows(runs, key_runs)
            attention.attend(query, *params.key_and_value(pool.split(0, rows)), params)
        if heads is not None:
            key, value = heads.expand(*pool.split(0, rows))
            attention = backend.prepare_rows(runs, key_runs)
            attention.attend(key[:num_queries], key, value, replace(params, value_dim=value.shape[-1]))


def merge_dummy(runner: ModelRunner) -> None:
    """Merge partials in the model's dtype, and those that other ranks return in fp32, to compile the kernels."""
    model, config = runner.model, runner.model.config.attention
    widths = {model.attention.value_dim} if runner.groups.cp.size > 1 else set[int]()
    if isinstance(config, LatentAttentionConfig):
        widths.add(config.value_dim)  # of tiles of expanded keys, also on one rank
    for width, dtype in product(widths, {model.dtype, torch.float32}):
        out = torch.zeros(1, model.attention.num_heads, width, device=model.device.torch_device)
        merge_in_turn(Partial(each, out[..., 0].contiguous()) for each in (out, out.to(dtype, copy=True)))
