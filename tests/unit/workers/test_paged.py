"""Copies of pages are whole, stand where nobody else writes, and take memory once."""

import threading

import torch

from workers.attention.paged import gather_key_value, gather_pages, page_rows

NUM_PAGES, NUM_HEADS, PAGE_SIZE, HEAD_DIM = 9, 2, 4, 8


def make_pages(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_PAGES, NUM_HEADS, PAGE_SIZE, HEAD_DIM, generator=generator)


def in_order(pages: torch.Tensor, table: list[int]) -> torch.Tensor:
    return torch.cat([pages[page] for page in table], dim=1)[None]


def rows_of(table: list[int]) -> torch.Tensor:
    return page_rows(torch.tensor([table]), NUM_HEADS)


def test_keys_and_values_do_not_share_their_copies() -> None:
    keys, values = make_pages(0), make_pages(1)
    key, value = gather_key_value(rows_of([5, 0, 7]), keys, values)
    assert torch.equal(key, in_order(keys, [5, 0, 7]))
    assert torch.equal(value, in_order(values, [5, 0, 7]))


def test_a_shorter_copy_takes_the_memory_of_a_longer_one() -> None:
    pages = make_pages(0)
    longer = gather_pages(rows_of([1, 2, 3, 4, 5]), pages)
    shorter = gather_pages(rows_of([8, 6]), pages)
    assert shorter.data_ptr() == longer.data_ptr()
    assert torch.equal(shorter, in_order(pages, [8, 6]))


def test_a_longer_copy_is_whole() -> None:
    pages = make_pages(0)
    for table in ([3], [3, 1], [*range(NUM_PAGES)], [*range(NUM_PAGES)] * 5):
        assert torch.equal(gather_pages(rows_of(table), pages), in_order(pages, table))


def test_each_dtype_has_its_own() -> None:
    pages = make_pages(0)
    copied = gather_pages(rows_of([4]), pages)
    gather_pages(rows_of([5]), pages.bfloat16())
    assert torch.equal(copied, in_order(pages, [4]))


def test_each_thread_has_its_own() -> None:
    pages = make_pages(0)
    copied = gather_pages(rows_of([4]), pages)
    other = threading.Thread(target=lambda: gather_pages(rows_of([5]), pages))
    other.start()
    other.join()
    assert torch.equal(copied, in_order(pages, [4]))


def test_memory_taken_in_inference_serves_elsewhere() -> None:
    pages = make_pages(0).double()
    with torch.inference_mode():
        gather_pages(rows_of([4]), pages)
    assert torch.equal(gather_pages(rows_of([5]), pages), in_order(pages, [5]))
