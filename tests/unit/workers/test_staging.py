"""Pages on their way through host memory: each in its place, and no other touched."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from workers.cache.staging import Staging

from tests.fakes.kv import kv_pool
from workers.memory.page_pool import PagePool


def make_staging() -> tuple[PagePool, torch.Tensor, Staging]:
    pool = kv_pool(5, 2, 3, 4, 8, torch.bfloat16)
    pool.group("full_attention").copy_(torch.randn(pool.group("full_attention").shape))
    host = torch.zeros(6 * pool.page_bytes + 100, dtype=torch.uint8)
    return pool, host, Staging(pool, host.numpy().data)


@given(st.lists(st.integers(0, 4), unique=True))
def test_pages_go_out(pages: list[int]) -> None:
    pool, host, staging = make_staging()
    staging.put_out(pages, slice(None), staging.mark())
    by_page = host[: 6 * pool.page_bytes].view(torch.bfloat16).view(pool.group("full_attention").shape)
    for page in range(6):
        expected = (
            pool.group("full_attention")[page]
            if page in pages
            else torch.zeros_like(pool.group("full_attention")[page])
        )
        assert torch.equal(by_page[page], expected)


@given(st.lists(st.integers(0, 4), unique=True), st.integers(0, 2), st.integers(0, 3))
def test_layers_go_out(pages: list[int], first: int, last: int) -> None:
    pool, host, staging = make_staging()
    staging.put_out(pages, slice(first, last), staging.mark())
    expected = torch.zeros_like(pool.group("full_attention"))
    expected[pages, :, first:last] = pool.group("full_attention")[pages, :, first:last]
    assert torch.equal(
        host[: 6 * pool.page_bytes].view(torch.bfloat16).view(pool.group("full_attention").shape), expected
    )


@given(st.lists(st.integers(0, 4), unique=True))
def test_pages_come_in(pages: list[int]) -> None:
    pool, host, staging = make_staging()
    before = pool.group("full_attention").clone()
    host.fill_(1)
    staging.take_in(pages)
    for page in range(6):
        expected = torch.ones(pool.page_bytes, dtype=torch.uint8).view(torch.bfloat16).view(before[0].shape)
        assert torch.equal(pool.group("full_attention")[page], expected if page in pages else before[page])
