"""Comparison of the kernels that select keys with plain torch on any device."""

from unittest.mock import patch

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fakes.kernel_cases import DTYPES
from workers.attention.selection import NO_KEY, Chosen, IndexQueries, best_keys, index_scores
from workers.kernels import selection
from workers.kernels.selection import VisibleKeys, choose, locate, score_run, score_tokens

_SHAPES = st.sampled_from([(64, 4, 64), (16, 1, 128), (64, 5, 24), (128, 32, 128)])
"""Page sizes, heads of an indexer, and their width."""


def _paged(lens: list[int], page_size: int, dim: int, dtype: torch.dtype) -> tuple[VisibleKeys, list[Tensor]]:
    """Return keys of requests in pages of any order, one query per request, and each request's keys in order.

    All other slots are NaN. A page holds other things, too.
    """
    counts = [-(-length // page_size) for length in lens]
    pages = torch.full((sum(counts) + 1, 1, 2, page_size, dim), torch.nan, dtype=dtype)
    tables = torch.randperm(len(pages))[: sum(counts)]
    keys = []
    for length, table in zip(lens, torch.split(tables, counts), strict=True):
        keys.append(torch.randn(length, dim).to(dtype))
        numbers = torch.arange(length)
        pages[table[numbers // page_size], 0, 1, numbers % page_size] = keys[-1]
    first_pages = torch.tensor([0, *counts]).cumsum(0)[:-1].int()
    return VisibleKeys(pages[:, :, 1], tables, first_pages, torch.tensor(lens, dtype=torch.int32)), keys


def _moved(visible: VisibleKeys, device: str) -> VisibleKeys:
    """Return the same keys on another device, where moving them all keeps their strides."""
    return VisibleKeys(*(tensor.to(device) for tensor in visible))


def check_scores(data: st.DataObject, device: str) -> None:
    """Check both kernels on queries of several requests. Scores of keys that no query sees are not written."""
    (page_size, num_heads, dim), dtype = data.draw(_SHAPES), data.draw(DTYPES)
    lens = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=3))
    begin = data.draw(st.sampled_from([0, 0, 7, 128]))
    width = max(max(lens) - begin, 0)
    width = data.draw(st.sampled_from([width, width // 2]))
    visible, keys = _paged(lens, page_size, dim, dtype)
    q = torch.randn(len(lens), num_heads + 1, dim).to(dtype)[:, 1:]
    weights = torch.randn(len(lens), num_heads)
    expected = torch.full((len(lens), width), torch.nan)
    for row, of_request in enumerate(keys):
        index = IndexQueries(q[row : row + 1], weights[row : row + 1])
        scores = index_scores(index, of_request)[0, begin : begin + width]
        expected[row, : len(scores)] = scores
    inputs = q.to(device), weights.to(device)
    score_tokens(*inputs, _moved(visible, device), found := _nothing(expected, device), begin)
    _compare(found, expected)
    _check_run(q, weights, visible, keys[0], slice(begin, begin + width), device)


def _nothing(expected: Tensor, device: str) -> Tensor:
    """Return the first columns of a wider tensor, which contains only NaN."""
    return torch.full((len(expected), expected.shape[1] + 130), torch.nan, device=device)[:, : expected.shape[1]]


def _compare(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4, equal_nan=True)
    assert found._base is not None
    assert found._base[:, found.shape[1] :].isnan().all()


def _check_run(q: Tensor, weights: Tensor, visible: VisibleKeys, keys: Tensor, tile: slice, device: str) -> None:
    """Check scores of the first request's keys, of which each query sees as many as its own request has."""
    num_keys = visible.num_keys.clamp(max=len(keys))
    run = visible._replace(num_keys=num_keys, first_pages=torch.zeros_like(visible.first_pages))
    scores = index_scores(IndexQueries(q, weights), keys).masked_fill(
        torch.arange(len(keys)) >= num_keys[:, None], torch.nan
    )
    expected = scores[:, tile]
    score_run(q.to(device), weights.to(device), _moved(run, device), found := _nothing(expected, device), tile.start)
    _compare(found, expected)


def check_chosen(data: st.DataObject, device: str) -> None:
    """Check choices from one and from several parts of a row, among many equal scores and any others."""
    width, top_k = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 40))
    num_rows, span = data.draw(st.integers(0, 3)), data.draw(st.sampled_from([1, 100, 1 << 14]))
    scores = torch.randn(num_rows, width) * data.draw(st.sampled_from([1.0, 1e-42, 1e38]))
    scores = torch.where(torch.rand(num_rows, width) < data.draw(st.sampled_from([0.0, 0.9])), 0.0, scores)
    scores += 0.0  # there is no -0
    counts = torch.randint(0, width + 1, (num_rows,), dtype=torch.int32)
    with patch.object(selection, "_SPAN", span):
        found = choose(scores.to(device), counts.to(device), top_k)
    for row, count in enumerate(counts.tolist()):
        expected = best_keys(Chosen(scores[row : row + 1, :count], torch.arange(count)[None]), top_k)
        missing = top_k - expected.keys.shape[1]
        assert found[1][row].tolist() == expected.keys[0].tolist() + [NO_KEY] * missing
        assert found[0][row].tolist() == expected.scores[0].tolist() + [-torch.inf] * missing


def check_located(data: st.DataObject, device: str) -> None:
    page_size, num_parts, part_len = data.draw(st.sampled_from([(16, 1, 50), (64, 3, 16), (5, 2, 9)]))
    lens = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=3))
    visible, _ = _paged(lens, page_size, 8, torch.float32)
    selected = torch.full((len(lens), num_parts * part_len), NO_KEY, dtype=torch.int32)
    places, segments = torch.zeros(selected.shape, dtype=torch.int64), torch.zeros(len(lens) * num_parts, 6)
    for row, length in enumerate(lens):
        chosen = torch.randperm(length)[: data.draw(st.integers(0, selected.shape[1]))]
        selected[row, : len(chosen)] = chosen
    places, segments = places.to(device), segments.int().to(device)
    locate(selected.to(device), _moved(visible, device), 8, places, segments, part_len)
    for row, (numbers, first) in enumerate(zip(selected.long(), visible.first_pages.tolist(), strict=True)):
        count = int((numbers != NO_KEY).sum())
        pages = visible.tables[first + numbers[:count] // page_size]
        assert places[row, :count].tolist() == (pages * 2 * page_size + numbers[:count] % page_size).tolist()
        of_row = segments.view(len(lens), num_parts, 6)[row]
        assert of_row[:, 3].tolist() == [min((part + 1) * part_len, count) for part in range(num_parts)]
        assert of_row[:, 4].tolist() == [count - 1] * num_parts


SELECTION_CHECKS = (check_scores, check_chosen, check_located)
