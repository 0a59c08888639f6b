"""Ranks that hold the same heads: each is sent its part of the pages, and all have all of them afterwards."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from workers.cache.head_copies import HeadCopies

from tests.fakes.kv import kv_pool
from tests.fakes.thread_group import on_thread_ranks
from workers.cache import head_copies
from workers.memory.page_pool import PagePool
from workers.parallel.collectives import Communicator

NUM_PAGES = 12
OLD = -1.0


def make_pool(sent: list[int]) -> PagePool:
    """With the number of each page that was sent, and older content elsewhere."""
    pool = kv_pool(NUM_PAGES, 1, 2, 4, 3, torch.float32)
    pool.group("full_attention").fill_(OLD)
    for page in sent:
        pool.group("full_attention")[page] = float(page)
    return pool


def spread(size: int, pages: list[int]) -> list[PagePool]:
    """The pool of every rank afterwards."""

    def rank(group: Communicator) -> PagePool:
        pool = make_pool([page for page in pages if page % size == group.rank])
        HeadCopies(pool, group).spread(pages)
        return pool

    return on_thread_ranks(size, rank)


@given(st.integers(1, 4), st.lists(st.integers(0, NUM_PAGES - 1), max_size=NUM_PAGES))
def test_every_rank_has_every_page_afterwards(size: int, pages: list[int]) -> None:
    for pool in spread(size, pages):
        assert torch.equal(pool.group("full_attention"), make_pool(pages).data)


def test_more_than_is_gathered_at_a_time_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_copies, "MOST_BYTES", 2 * make_pool([]).page_bytes)
    pages = list(range(NUM_PAGES))
    for pool in spread(2, pages):
        assert torch.equal(pool.group("full_attention"), make_pool(pages).data)


def test_a_rank_alone_needs_nobody() -> None:
    pool = make_pool([0, 1])
    HeadCopies(pool, Communicator("head_copies")).spread([0, 1])
    assert torch.equal(pool.group("full_attention"), make_pool([0, 1]).data)
