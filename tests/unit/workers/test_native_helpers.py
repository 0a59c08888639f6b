"""Helpers of the lowest priority, which may be late: results are the same bits with any number of them."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cluster.spec.config import AttentionSetting
from tests.fakes.amx import kinds_to_test
from workers.device import CPU
from workers.engine.native_kernels import num_helpers_of, start_helpers
from workers.expert_parallel.token_dispatcher import RoutedTokens
from workers.layers.feed_forward import Experts
from workers.layers.matmul import _pack_for
from workers.layers.shard import even_shard
from workers.native.compile import find_compiler
from workers.native.library import Library
from workers.parallel.model_groups import Part

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the lowest priority")

NUM_HELPED = 40
"""Number of parts of the work that helpers compute in each test. Where there are more of them than cores, some are
late.
"""


@pytest.fixture(params=[pytest.param(kind, id=kind.name, marks=pytest.mark.native) for kind in kinds_to_test()])
def library(request: pytest.FixtureRequest) -> Library:
    return Library.load(find_compiler()._replace(kind=request.param))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def raise_priority_of_helpers() -> None:
    """Let helpers compete with other processes for cores if the system allows it, so that tests do not wait long."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(PermissionError, ProcessLookupError):
            os.sched_setscheduler(int(thread.name), os.SCHED_OTHER, os.sched_param(0))


def check_same(library: Library, compute: Callable[[], Tensor], lasting: Tensor) -> None:
    """Call ``compute`` with some helpers until they have computed enough. ``lasting`` outlives them."""
    expected, deadline_s = compute(), time.monotonic() + 60
    for count in (1, 8):
        library.start_helpers(count, lasting)
        raise_priority_of_helpers()
        try:
            while library.num_helped < NUM_HELPED:
                assert time.monotonic() < deadline_s, f"helpers have computed {library.num_helped} parts"
                assert torch.equal(compute(), expected)
        finally:
            library.stop_helpers()  # before the test frees what late helpers read


@pytest.mark.parametrize("num_rows", [1, 7, 16, 130, 700])
@pytest.mark.parametrize("shape", [(1000, 512), (4096, 130)])
def test_linear(library: Library, num_rows: int, shape: tuple[int, int]) -> None:
    matrix = _pack_for(library, draw(*shape).bfloat16())
    x, bias = draw(num_rows, shape[1] + 3).bfloat16()[:, 3:], draw(shape[0]).bfloat16()
    check_same(library, lambda: matrix.multiply_natively(library, x, bias), matrix.matrix)


@pytest.mark.parametrize("num_rows", [1, 16, 700])
def test_gated_linear(library: Library, num_rows: int) -> None:
    matrix, x = _pack_for(library, draw(4096, 130).bfloat16()), draw(num_rows, 130).bfloat16()

    def compute() -> Tensor:
        found = matrix.multiply_gated(x, None)
        assert found is not None
        return found

    check_same(library, compute, matrix.matrix)


@pytest.mark.parametrize("num_tokens", [1, 16, 900])
def test_experts(library: Library, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPU, "packs_bf16", False)
    experts = Experts(64, even_shard(32, Part(0, 1)), range(2, 9))
    for parameter in experts.parameters():
        parameter.data = draw(*parameter.shape).bfloat16() / 8
    experts.pack(library)
    chosen = draw(num_tokens, 10).topk(4).indices.int()
    routed = RoutedTokens(draw(num_tokens, 64).bfloat16(), chosen, draw(num_tokens, 4))
    check_same(library, lambda: experts(routed), routed.hidden)


def attention(library: Library, pages: Tensor, lens: list[tuple[int, int]]) -> Callable[[], Tensor]:
    """Return attention of the last tokens of some requests: numbers of queries and keys."""
    heads, (_, _, _, page_size, dim), dtype = 21, pages.shape, pages.dtype
    firsts = list(accumulate((num_queries for num_queries, _ in lens), initial=0))
    query = draw(firsts[-1], heads + 1, dim).to(dtype)[:, 1:]
    tables = torch.randperm(len(pages))
    rows = [
        [first, num_queries, 50 * request, 5, num_keys, num_keys - num_queries, 1]
        for request, (first, (num_queries, num_keys)) in enumerate(zip(firsts, lens, strict=False))
    ]

    def attend() -> Tensor:
        out, lse = torch.empty(query.shape, dtype=dtype), torch.empty(query.shape[:2])
        kv = pages[:, :, 0], pages[:, :, 1]
        library.attend(torch.tensor(rows), tables, page_size, query, *kv, out, lse, scale=0.1, overwrites=True)
        return torch.cat((out.float(), lse[..., None]), dim=-1)

    return attend


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lens", [[(1, 4000)], [(1, 700), (1, 1500), (1, 2)], [(900, 1300), (1, 700), (50, 50)]])
def test_attention(library: Library, dtype: torch.dtype, lens: list[tuple[int, int]]) -> None:
    pages = draw(300, 3, 2, 16, 40).to(dtype)
    check_same(library, attention(library, pages, lens), pages)


def test_helpers_do_not_read_keys_that_may_be_freed(library: Library) -> None:
    pages = draw(300, 3, 2, 16, 40)
    attend = attention(library, pages, [(900, 1300)])
    library.start_helpers(1, draw(1))
    for _ in range(20):
        attend()
    assert library.num_helped == 0
    library.stop_helpers()


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "quota", "expected"),
    [
        (1, 1, 1, None, 0),
        (2, 1, 1, None, 1),
        (2, 2, 1, None, 0),
        (2, 4, 1, None, 0),
        (7, 2, 1, None, 2),
        (64, 1, 1, None, 3),
        (64, 1, 2, None, 0),
        (64, 1, 1, "max 100000", 3),
        (64, 1, 1, "400000 100000", 0),
    ],
)
def test_helpers_use_cores_that_may_be_idle(
    cores: int,
    ranks: int,
    threads: int,
    quota: str | None,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    assert num_helpers_of(AttentionSetting.AUTO, CPU, ranks, tmp_path / "cpu.max") == expected
    assert num_helpers_of(AttentionSetting.TORCH, CPU, ranks, tmp_path / "cpu.max") == 0


@pytest.mark.native
def test_helpers_have_the_lowest_priority_and_stop() -> None:
    def priorities() -> list[int]:
        threads = (int(thread.name) for thread in Path("/proc/self/task").iterdir())
        return [os.sched_getscheduler(thread) for thread in threads]

    stop = start_helpers(2, torch.empty(1))
    deadline_s = time.monotonic() + 10
    while priorities().count(os.SCHED_IDLE) < 2:
        assert time.monotonic() < deadline_s, "the helpers have not started"
        time.sleep(0.01)
    stop()
    assert os.SCHED_IDLE not in priorities()
    start_helpers(0, torch.empty(1))
    assert os.SCHED_IDLE not in priorities()
