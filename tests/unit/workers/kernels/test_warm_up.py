"""Every kernel for a GPU is compiled before the first request."""

import random
import threading
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.spec.kv import pages_for
from cluster.spec.registry import KvOwnership
from cluster.spec.strategy import Passing, Strategy
from tests.fakes.attention_params import params_for
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.devices import CpuWithKernels, kernels_on_cpu
from tests.fakes.kv import kv_pool
from tests.fakes.steps import Request, step_of
from tests.fakes.thread_group import on_thread_ranks
from workers.attention import merge as merging
from workers.attention.merge import Partial, merge_into
from workers.attention.runs import Run
from workers.attention.torch_backend import TorchAttention
from workers.attention.triton import backend, selection
from workers.attention.triton.backend import TritonAttention
from workers.engine.rank_groups import RankGroups
from workers.engine.runner import ModelRunner
from workers.engine.warm_up import KERNEL_STEPS, merge_dummy, warm_up
from workers.engine.weights import load_model
from workers.kernels import copy_pages, sampling
from workers.kernels.attention import Blocks, blocks_for
from workers.layers.attention_config import LatentAttentionConfig
from workers.memory.page_pool import PagePool
from workers.parallel.communicator import Communicator


def test_attention_is_warmed_up_in_blocks_of_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both complete attention and parts in fp32 are warmed up."""
    model = load_model(
        make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2), dtype=torch.bfloat16, device=CpuWithKernels()
    )
    config = model.config
    pool = kv_pool(2, config.attention.num_kv_heads, config.num_layers, 64, config.attention.head_dim, torch.bfloat16)
    one = ModelRunner(model, pool, TritonAttention(), RankGroups(), KvOwnership.REPLICATED, None)
    seen: set[tuple[Blocks, bool]] = set()

    def note_attend(*tensors: Tensor, **others: Any) -> None:
        *_, out, lse = tensors
        seen.add((others["blocks"], others["parts"] is None))
        out.zero_()
        lse.zero_()

    monkeypatch.setattr(backend, "attend", note_attend)
    warm_up(one)
    groups, dim = config.attention.num_heads // config.attention.num_kv_heads, config.attention.head_dim
    blocks = {
        blocks_for(num_queries, groups, head_dim=dim, value_dim=dim, itemsize=2, page_size=64)
        for num_queries in range(1, 4096)
    }
    assert seen == set(product(blocks, (True, False)))


def test_selections_are_warmed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries have a kernel of their own for scores. Keys are chosen once by number and then from what was chosen,
    and attention is complete or in parts.
    """
    model = load_model(make_checkpoint(tmp_path, "deepseek_v32", index_topk=600), device=CpuWithKernels())
    pool = PagePool.of_one_rank(model.config.kv_geometry("m", "float32", 64), 2)
    seen: set[object] = set()

    def note_choice(scores: Tensor, _: Tensor, top_k: int, numbers: Tensor | None = None) -> tuple[Tensor, Tensor]:
        seen.add(("choice", numbers is None, scores.shape[1] > 1 << 14))
        best = scores.new_zeros(len(scores), top_k)
        return best, best.int()

    def note_attend(*tensors: Tensor, **others: Any) -> None:
        if others["page_size"] == 1:
            seen.add(("attention", others["parts"] is None))
        tensors[3].zero_()
        tensors[4].zero_()

    for kernel in ("score_run", "score_tokens"):
        monkeypatch.setattr(selection, kernel, lambda *_, kernel=kernel: seen.add(kernel))
    monkeypatch.setattr(selection, "locate", lambda *_: None)
    monkeypatch.setattr(selection, "choose", note_choice)
    for module in (backend, selection):
        monkeypatch.setattr(module, "attend", note_attend)
    warm_up(ModelRunner(model, pool, TritonAttention(), RankGroups()))
    assert seen >= {"score_run", "score_tokens", ("attention", True), ("attention", False)}
    assert seen >= {("choice", True, True), ("choice", False, False)}


def test_sampling_and_copying_are_warmed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2))
    config = model.config
    pool = kv_pool(2, config.attention.num_kv_heads, config.num_layers, 64, config.attention.head_dim, torch.float32)
    launched: list[str] = []

    def win_race(_: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        launched.append("race")
        return torch.empty_like(keys)

    kernels_on_cpu(monkeypatch)
    monkeypatch.setattr(sampling, "find_cutoffs", lambda *_: launched.append("cutoffs"))
    monkeypatch.setattr(sampling, "win_race", win_race)
    monkeypatch.setattr(copy_pages, "copy_pages", lambda *_: launched.append("copies"))
    monkeypatch.setattr(ModelRunner, "run_dummy", lambda *_: None)  # slow, and covered above
    warm_up(ModelRunner(model, pool, TritonAttention(), RankGroups()))
    assert launched == ["cutoffs", "race", "copies"]


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_kernels_for_rows_of_ranks_are_warmed_up(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's last layer, which needs only one token, is also warmed up."""
    seen: set[tuple[Blocks, bool]] = set()

    def note_attend(*_: Tensor, **others: Any) -> None:
        seen.add((others["blocks"], others["parts"] is None))

    monkeypatch.setattr(backend, "attend", note_attend)

    def attend(num_queries: int, num_keys: int) -> None:
        key = torch.empty(num_keys, kv_heads, 128, dtype=torch.bfloat16)
        query = torch.empty(num_queries, 4 * kv_heads, 128, dtype=torch.bfloat16)
        runs = [Run(0, num_keys - num_queries, num_queries, 1)], [Run(0, 0, num_keys, 1)]
        TritonAttention().prepare_rows(*runs).attend(query, key, key, params_for(query))

    for num_tokens, _ in KERNEL_STEPS:
        attend(num_tokens, num_tokens)
        attend(1, num_tokens)
    warm = set(seen)
    for num_tokens in (1, 100, 1000, 2000, 4096):
        attend(num_tokens, num_tokens)
        attend(1, num_tokens)
    assert seen == warm


def compute_any_steps(
    one: ModelRunner, cp: int, ownership: KvOwnership, counts: Sequence[int], prefix_lens: Sequence[int]
) -> None:
    """Compute steps of several requests with every strategy and way of passing.

    Some requests have no tokens on some ranks, and some have no prefix.
    """
    rng, pages = random.Random(0), range(pages_for(max(counts) + max(prefix_lens), one.pool.page_size))
    passings = [None] if ownership is KvOwnership.REPLICATED else list(Passing)
    for strategy, passing in product(Strategy, passings):
        for _ in range(4):
            lens = [(rng.choice(counts), rng.choice(prefix_lens)) for _ in range(rng.randrange(1, 4))]
            requests = [Request([1] * count, prefix_len, pages) for count, prefix_len in lens]
            with torch.inference_mode():
                one._compute(step_of(requests, strategy, cp, passing))


@pytest.mark.parametrize("ownership", list(KvOwnership))
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_attention_of_any_strategy_and_mix_of_extends_is_warmed_up(
    family: str, ownership: KvOwnership, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short extend beside a long one attends to latents in another form, and with fewer queries, than alone."""
    folder = make_checkpoint(tmp_path, family, num_hidden_layers=2)
    seen = threading.local()

    def note_attend(query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, **others: Any) -> None:
        in_parts, shapes = others["parts"] is not None, (query.shape[1:], key.shape[-1], value.shape[-1])
        seen.kernels.add((others["blocks"], others["page_size"], in_parts, shapes))
        out.zero_()
        lse.zero_()

    monkeypatch.setattr(backend, "attend", note_attend)

    def compute(group: Communicator) -> tuple[Any, Any]:
        """Return the kernels at the start, and those after it."""
        seen.kernels = warm = set[Any]()
        model = load_model(folder, dtype=torch.bfloat16, device=CpuWithKernels())
        pool = PagePool.of_one_rank(model.config.kv_geometry("m", "bfloat16", 64), 200)
        one = ModelRunner(model, pool, TritonAttention(), RankGroups(cp=group), ownership, None)
        warm_up(one)
        seen.kernels = set()
        compute_any_steps(one, group.size, ownership, [1, 5, 131, 1500], [0, 1024, 5000])
        return warm, seen.kernels

    for warm, later in on_thread_ranks(3, compute):
        assert later <= warm


@pytest.mark.parametrize("ownership", list(KvOwnership))
def test_partials_are_merged_before_in_every_way_that_a_plan_may_ask_for(
    ownership: KvOwnership, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each combination of dtypes is a separate kernel."""
    folder = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    merged = threading.local()

    def note_merge(joined: Partial, found: Partial) -> None:
        merged.kinds.add((joined.out.dtype, found.out.dtype))
        merge_into(joined, found)

    monkeypatch.setattr(merging, "merge_into", note_merge)

    def compute(group: Communicator) -> tuple[Any, Any]:
        """Return the merges at the start, and those after it."""
        merged.kinds = warm = set[Any]()
        model = load_model(folder, dtype=torch.bfloat16, device=CpuWithKernels())
        config = model.config
        pool = kv_pool(
            20, config.attention.num_kv_heads, config.num_layers, 16, config.attention.head_dim, torch.bfloat16
        )
        one = ModelRunner(model, pool, TorchAttention(), RankGroups(cp=group), ownership, None)
        warm_up(one)
        merged.kinds = set()
        compute_any_steps(one, group.size, ownership, [1, 2, 50], [0, 100])
        return warm, merged.kinds

    for warm, later in on_thread_ranks(3, compute):
        assert later <= warm


def test_tiles_of_expanded_keys_are_merged_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are narrower than latents, and one rank has several tiles, too."""
    model = load_model(make_checkpoint(tmp_path, "deepseek_v3"), dtype=torch.bfloat16, device=CpuWithKernels())
    pool = PagePool.of_one_rank(model.config.kv_geometry("m", "bfloat16", 64), 2)
    merged = set[Any]()

    def note_merge(joined: Partial, found: Partial) -> None:
        merged.add((joined.out.shape[-1], found.out.dtype))

    kernels_on_cpu(monkeypatch)
    monkeypatch.setattr(merging, "merge_into", note_merge)
    merge_dummy(ModelRunner(model, pool, TritonAttention(), RankGroups()))
    assert isinstance(model.config.attention, LatentAttentionConfig)
    assert model.attention.value_dim != model.config.attention.value_dim
    assert merged == {(model.config.attention.value_dim, dtype) for dtype in (torch.bfloat16, torch.float32)}
