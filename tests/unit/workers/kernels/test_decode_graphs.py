"""Captured decode steps compared with normal ones. A fake of CUDA graphs computes again at each replay."""

from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.spec.config import ParallelConfig
from cluster.spec.decode_graphs import batch_sizes
from tests.fakes.attention_params import params_for, shape_for
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.counted_launches import CountedLaunches
from tests.fakes.devices import kernels_on_cpu
from tests.fakes.kv import kv_pool
from tests.fakes.plain_graphs import PlainGraphs
from tests.fakes.steps import Request, step_of
from tests.fakes.thread_group import on_thread_ranks
from tests.fakes.thread_layout import on_thread_layout, tp_groups
from workers.attention.runs import Run
from workers.attention.selection import NO_KEY, IndexQueries
from workers.attention.torch_backend import TorchAttention
from workers.attention.triton import decode as triton_decode
from workers.attention.triton.backend import TritonAttention
from workers.attention.triton.decode import DecodeAttention
from workers.attention.triton.tiling import fair_share
from workers.context_parallel.shard_plan import join_shapes
from workers.device import CPU
from workers.engine.attention_context import make_context
from workers.engine.batch import build_step_batch
from workers.engine.begun_step import PreviousTokens
from workers.engine.captures import CaptureError
from workers.engine.decode_graphs import REPLAYED, DecodeGraphs
from workers.engine.step_context import CpExchange
from workers.engine.weights import load_model
from workers.layers.feed_forward import Experts
from workers.memory.page_pool import PagePool
from workers.models.decoder import DecoderModel
from workers.parallel.communicator import Communicator
from workers.parallel.model_groups import ModelGroups, Part


def capture(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    out = compute()

    def replay() -> None:
        out.copy_(compute())

    return out, replay


def usual(model: DecoderModel, pool: PagePool, requests: list[Request]) -> Tensor:
    batch = build_step_batch(
        step_of(requests),
        cp=1,
        cp_rank=0,
        page_size=pool.page_size,
        null_slot=pool.null_slot,
        device=model.device,
    )
    context = make_context(batch, pool, TorchAttention(), CpExchange(Communicator("cp")))
    hidden: Tensor = model(batch.token_ids, batch.positions, context)
    return hidden


def test_steps_with_changing_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(make_checkpoint(tmp_path, "qwen3"))
    config = model.config
    pool = kv_pool(6, config.attention.num_kv_heads, config.num_layers, 4, config.attention.head_dim, torch.float32)
    pool.group("full_attention").copy_(torch.randn(pool.group("full_attention").shape))
    steps = [
        [Request([5], 6, [4, 1], True), Request([7], 0, [2], True), Request([9], 3, [5], True)],
        [Request([6], 7, [4, 1], True)],
    ]
    with torch.inference_mode():
        kernels_on_cpu(monkeypatch)
        graphs = DecodeGraphs(model, pool, TritonAttention(), 3, capture)
        before = pool.group("full_attention").clone()
        replayed = []
        for rows in steps:
            hidden = graphs.run(step_of(rows))
            assert hidden is not None
            replayed.append(hidden.clone())
        kernels_on_cpu(monkeypatch, on=False)
        after, pool.group("full_attention")[:] = pool.group("full_attention").clone(), before
        for rows, found in zip(steps, replayed, strict=True):
            torch.testing.assert_close(found, usual(model, pool, rows), atol=1e-4, rtol=1e-4)
        kernels_on_cpu(monkeypatch)
        unknown = [row._replace(token_ids=[0]) for row in steps[0]]
        previous = PreviousTokens(torch.tensor([0, 2]), torch.tensor([5, 9]))
        hidden = graphs.run(step_of([unknown[0], steps[0][1], unknown[2]])._replace(previous=previous))
        assert hidden is not None
        torch.testing.assert_close(hidden, replayed[0])
        kernels_on_cpu(monkeypatch, on=False)
    torch.testing.assert_close(after[:-1], pool.group("full_attention")[:-1], atol=1e-4, rtol=1e-4)
    assert graphs.run(step_of([Request([1, 2], 0, [0], True)])) is None
    assert graphs.run(step_of([Request([1], 0, [0], True)] * 4)) is None
    assert graphs.counts == {REPLAYED: 3, "prompt tokens": 1, "more requests than captured": 1}


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
def test_steps_with_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """A request has more keys than an indexer selects, another one has fewer, and the padding has a single one."""
    model = load_model(make_checkpoint(tmp_path, family))
    pool = PagePool.of_one_rank(model.config.kv_geometry("latents", "float32", 4), 8)
    for part in chain.from_iterable(map(pool.layer_view, range(model.config.num_layers))):
        part.normal_()
    rows = [Request([5], 17, [4, 1, 7, 2, 0], True), Request([7], 3, [5], True), Request([9], 0, [6], True)]
    with torch.inference_mode():
        kernels_on_cpu(monkeypatch)
        monkeypatch.setattr(CPU, "has_own_memory", True)  # like a GPU, it captures steps of some sizes
        graphs = DecodeGraphs(model, pool, TritonAttention(), 4, capture)
        before, hidden = pool.bytes.clone(), graphs.run(step_of(rows))
        assert hidden is not None
        found, after = hidden.clone(), pool.bytes.clone()
        pool.bytes.copy_(before)
        kernels_on_cpu(monkeypatch, on=False)
        torch.testing.assert_close(found, usual(model, pool, rows), atol=1e-4, rtol=1e-4)
    end = pool.num_pages * pool.page_bytes
    stored, expected = (memory[:end].view(torch.float32) for memory in (after, pool.bytes))
    torch.testing.assert_close(stored, expected, atol=1e-4, rtol=1e-4)
    assert graphs.counts == {REPLAYED: 1}


def test_scores_of_few_requests_exist_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    lens, page_size, pages = [70, 3, 20], 16, [5, 1, 2]
    keys, tables = torch.randn(8, 1, page_size, 8), torch.split(torch.randperm(8), pages)
    index = IndexQueries(torch.randn(3, 2, 8), torch.randn(3, 2))
    attention = DecodeAttention(shape_for(torch.zeros(3, 2, 24), 1, 5, page_size))
    attention.fill(lens, [table.numpy() for table in tables])
    monkeypatch.setattr(triton_decode, "MOST_CAPTURED_SCORES", 2 * 5 * page_size)
    found = attention.best_keys(index, keys, 6)
    for row, (length, table) in enumerate(zip(lens, tables, strict=True)):
        one = index.rows(slice(row, row + 1))
        expected = TorchAttention().best_keys(one, keys, table, np.array([length]), 6).keys[0].tolist()
        assert found[row].tolist() == expected + [NO_KEY] * (6 - len(expected))


def test_a_layer_is_nine_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for num_layers in (1, 2):
        model = load_model(make_checkpoint(tmp_path / str(num_layers), "qwen3", num_hidden_layers=num_layers))
        config = model.config
        pool = kv_pool(1, config.attention.num_kv_heads, num_layers, 4, config.attention.head_dim, torch.float32)
        with torch.inference_mode(), monkeypatch.context() as patch:
            kernels_on_cpu(patch)
            launches = CountedLaunches(patch)

            def capture_counting(compute: Callable[[], Tensor], launches: CountedLaunches = launches) -> Any:
                with launches:
                    return capture(compute)

            DecodeGraphs(model, pool, TritonAttention(), 1, capture_counting)
        counts.append(launches.counts)
    of_layer = counts[1] - counts[0]
    kernels = {"_rms_norm_kernel": 2, "_rotate_kernel": 1, "_attend_kernel": 1, "_swiglu_kernel": 1}
    assert of_layer == {"linear": 4, **kernels}


def test_padding_does_not_use_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step of five has three requests. The padding loads no weights and is not counted."""
    model = load_model(make_checkpoint(tmp_path, "qwen3_moe"))
    config = model.config
    pool = kv_pool(6, config.attention.num_kv_heads, config.num_layers, 4, config.attention.head_dim, torch.float32)
    pool.group("full_attention").copy_(torch.randn(pool.group("full_attention").shape))
    rows = [Request([5], 6, [4, 1], True), Request([7], 0, [2], True), Request([9], 3, [5], True)]
    experts = [module for module in model.modules() if isinstance(module, Experts)]

    def loads() -> list[list[int]]:
        return [layer.loads.tolist() for layer in experts]

    with torch.inference_mode():
        expected = usual(model, pool, rows)
        by_usual, _ = loads(), [layer.loads.zero_() for layer in experts]
        kernels_on_cpu(monkeypatch)
        monkeypatch.setattr(CPU, "has_own_memory", True)  # like a GPU, it captures steps of some sizes
        graphs = DecodeGraphs(model, pool, TritonAttention(), 5, capture)
        assert not any(map(any, loads())), "no request was in what was captured"
        hidden = graphs.run(step_of(rows))
        assert hidden is not None
        torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
    assert loads() == by_usual
    assert sum(by_usual[0]) == 3 * config.experts_per_token
    assert graphs.counts == {REPLAYED: 1}


def test_a_backend_without_graphs_runs_eagerly(tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, "qwen3"))
    pool = kv_pool(1, 1, 1, 4, model.config.attention.head_dim, torch.float32)
    graphs = DecodeGraphs(model, pool, TorchAttention(), 2, capture)
    assert graphs.run(step_of([Request([1], 0, [0], True)])) is None
    assert graphs.counts == {"attention cannot be captured": 1}


def test_steps_that_cannot_be_captured_run_eagerly(tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, "qwen3"))
    pool = kv_pool(1, 1, 1, 4, model.config.attention.head_dim, torch.float32)

    def fail(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:  # noqa: ARG001
        raise CaptureError("operation not permitted when stream is capturing")

    graphs = DecodeGraphs(model, pool, TritonAttention(), 2, fail)
    assert graphs.run(step_of([Request([1], 0, [0], True)])) is None
    assert graphs.counts == {"capture failed": 1}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("parallel", [ParallelConfig(dp=2), ParallelConfig(dp=2, tp=2)], ids=str)
def test_dp_ranks_replay_steps_of_one_size(
    tmp_path: Path, family: str, parallel: ParallelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has three requests and the other has one, then none. Each gets the same result as a rank alone."""
    # As if native code computed the experts.
    monkeypatch.setattr("workers.engine.decode_graphs._most_requests", lambda _: 4)
    folder = make_checkpoint(tmp_path, family)
    three = [Request([5], 6, [4, 1], True), Request([7], 0, [2], True), Request([9], 3, [5], True)]
    by_rank = [[three, three[:1]], [[Request([11], 5, [0, 3], True)], []]]

    def pool_of(model: DecoderModel, tp: Part) -> PagePool:
        """Return a pool with the heads of one rank."""
        config = model.config
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(
            7,
            config.attention.num_kv_heads * tp.size,
            config.num_layers,
            2,
            4,
            config.attention.head_dim,
            generator=generator,
        )
        pool = kv_pool(6, config.attention.num_kv_heads, config.num_layers, 4, config.attention.head_dim, torch.float32)
        pool.group("full_attention").copy_(
            whole.chunk(tp.size, dim=1)[tp.rank].reshape(pool.group("full_attention").shape)
        )
        return pool

    def replay(groups: ModelGroups) -> list[Tensor]:
        model = load_model(folder, groups=groups)
        pool = pool_of(model, Part(groups.tp.rank, groups.tp.size))
        graphs = DecodeGraphs(model, pool, PlainGraphs(), 4, capture)
        hidden = []
        for step in (0, 1):
            of_step = [step_of(steps[step]) for steps in by_rank]
            shape = join_shapes([each.shape for each in of_step], 1)[0]
            found = graphs.run(of_step[groups.position.dp]._replace(shape=shape))
            assert found is not None
            hidden.append(found.clone())
        assert graphs.run(step_of(three[:1])._replace(shape=step_of(three[:1] * 5).shape)) is None, (
            "another rank has more requests than captured"
        )
        assert graphs.counts == {REPLAYED: 2, "more requests than captured": 1}
        return hidden

    with torch.inference_mode():
        found = on_thread_layout(parallel, torch.inference_mode()(replay))
        alone = load_model(folder)
        for rank, hidden in enumerate(found):
            pool = pool_of(alone, Part(0, 1))
            for rows, of_step in zip(by_rank[rank // parallel.tp], hidden, strict=True):
                torch.testing.assert_close(of_step, usual(alone, pool, rows), atol=1e-4, rtol=1e-4)


def test_ranks_that_share_sums_replay_together_or_not_at_all(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")

    def counts_of(tp: Communicator) -> dict[str, int]:
        model = load_model(folder, groups=tp_groups(tp))
        pool = kv_pool(1, 1, 1, 4, model.config.attention.head_dim, torch.float32)
        sizes = iter([2, 1])

        def capture_but_last(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:  # noqa: ARG001
            if next(sizes) == tp.rank:
                raise CaptureError("out of memory")
            return torch.zeros(2, 1), lambda: None

        graphs = DecodeGraphs(model, pool, TritonAttention(), 2, capture_but_last)
        assert graphs.run(step_of([Request([1], 0, [0], True)])) is None
        return dict(graphs.counts)

    assert on_thread_ranks(2, counts_of) == [{"capture failed": 1}] * 2


@settings(max_examples=8)
@example(lens=[1600, 3, 70], groups=2, page_size=64, window=None)
@example(lens=[1600, 3, 70], groups=2, page_size=64, window=700)
@given(
    lens=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    groups=st.sampled_from([1, 3]),
    page_size=st.sampled_from([16, 64]),
    window=st.sampled_from([None, 1, 50]),
)
def test_attention_with_fixed_tiles(lens: list[int], groups: int, page_size: int, window: int | None) -> None:
    torch.manual_seed(0)
    pages = [-(-length // page_size) for length in lens]
    pool = kv_pool(sum(pages), 2, 1, page_size, 64, torch.float32)
    pool.group("full_attention").copy_(torch.randn(pool.group("full_attention").shape))
    tables = torch.split(torch.randperm(pool.num_pages), pages)
    query = torch.randn(len(lens), 2 * groups, 64)
    attention, params = DecodeAttention(shape_for(query, 2, max(pages), page_size)), params_for(query, window)
    runs = [Run(request, length - 1, 1, 1) for request, length in enumerate(lens)]
    expected = (
        TorchAttention()
        .prepare(runs, tables, page_size)
        .attend(query, *params.key_and_value(pool.layer_view(0)), params)
        .out
    )
    attention.fill([1] * len(lens), [table.numpy()[:1] for table in tables])
    attention.fill(lens, [table.numpy() for table in tables])
    found = attention.attend(query, *params.key_and_value(pool.layer_view(0)), params).out
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=64), st.sampled_from([1, 8]))
def test_fixed_tiles_hold_any_lengths(lens: list[int], num_kv_heads: int) -> None:
    """Tiling uses the same parts, except that a batch of one request may be split further."""
    attention = DecodeAttention(shape_for(torch.zeros(len(lens), 2 * num_kv_heads, 64), num_kv_heads, 1, 64))
    first_pages = np.arange(len(lens))
    tiles, segments = attention._split(np.array(lens), first_pages)
    num_used = int((tiles[:, 1] == 1).sum())
    used = segments[:num_used]
    assert not tiles[num_used:, 1].any()
    longest = int((used[:, 3] - used[:, 2]).max())
    assert longest < 2 * fair_share(sum(lens), 264 // num_kv_heads) + 64
    at = 0
    for row, length in enumerate(lens):
        count = tiles[at, 6]
        of_row = slice(at, at + count)
        ends = [0, *used[of_row, 3].tolist()]
        assert used[of_row, 2].tolist() == ends[:-1]
        assert ends[-1] == length
        assert set(used[of_row, 0].tolist()) == {row}
        expected = [[row, 1, 0, at + part, 1, part, count, at, 1] for part in range(count)]
        assert tiles[of_row].tolist() == expected
        at += count
    assert at == num_used


@given(st.integers(1, 300))
def test_batch_sizes(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert all(small < large <= max(2 * small, small + 4) for small, large in pairwise(sizes))
    assert len(sizes) <= 4 + 4 * most.bit_length()
