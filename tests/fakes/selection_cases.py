"""Keys for backends that select, compared with plain torch on a CPU."""

from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from tests.fakes.kernel_cases import Wanted
from workers.attention.interface import AttentionBackend, AttentionParams
from workers.attention.merge import Partial
from workers.attention.selection import NO_KEY, IndexQueries, QueryRun
from workers.attention.torch_backend import TorchAttention


class ChoiceCase(NamedTuple):
    """Queries of one request, and the number of their keys."""

    sizes: tuple[int, int, int]
    """Number of queries, heads of the indexer, and width of a key."""
    num_before: int
    top_k: int
    page_size: int
    seed: int


class AttentionCase(NamedTuple):
    """Queries that each attend to keys of their own."""

    sizes: tuple[int, int, int]
    """Number of heads, width of a key, and of its values."""
    num_queries: int
    most: int
    """Maximum number of keys of a query."""
    page_size: int
    seed: int


choice_cases = st.builds(
    ChoiceCase,
    st.sampled_from([(1, 1, 1), (70, 3, 20), (9, 64, 128), (5, 33, 7), (40, 96, 8), (1, 97, 4)]),
    st.integers(0, 700),
    st.sampled_from([1, 3, 60, 2000]),
    st.sampled_from([1, 16, 64]),
    st.integers(0, 99),
)
attention_cases = st.builds(
    AttentionCase,
    st.sampled_from([(1, 20, 16), (4, 64, 64), (8, 224, 192), (16, 40, 8), (128, 576, 512)]),
    st.integers(1, 9),
    st.integers(1, 300),
    st.sampled_from([1, 16, 64]),
    st.integers(0, 99),
)


def check_choice(backend: AttentionBackend, case: ChoiceCase, dtype: torch.dtype, device: str = "cpu") -> None:
    """Check scores that are small whole numbers, exact in any order of summation, and many of them equal."""
    (num_queries, num_heads, dim), page_size = case.sizes, case.page_size
    random = np.random.default_rng(case.seed)
    num_pages = -(-(case.num_before + num_queries) // page_size)
    keys = torch.from_numpy(random.integers(-1, 2, (num_pages + 1, 2, page_size, dim + 3))).to(dtype)[:, 1:, :, 3:]
    query = torch.from_numpy(random.integers(-2, 3, (num_queries, num_heads, dim))).to(dtype)
    weights = torch.from_numpy(random.integers(-2, 3, (num_queries, num_heads))).float()
    visible = np.sort(random.integers(case.num_before, case.num_before + num_queries + 1, num_queries))
    table = torch.from_numpy(random.permutation(num_pages + 1)[:num_pages])
    expected = TorchAttention().best_keys(IndexQueries(query, weights), keys, table, visible, case.top_k)
    index = IndexQueries(query.to(device), weights.to(device))
    rows = slice(0, num_queries)
    step = backend.prepare_selection([QueryRun(rows, table.to(device), visible)], num_queries)
    found = step.best_keys(index, keys.to(device), rows, case.top_k)
    scores, numbers = found.scores.cpu(), found.keys.cpu()
    assert torch.equal(scores, expected.scores)
    is_best = scores > -torch.inf
    assert torch.equal(numbers[is_best], expected.keys[is_best])


def attend(
    backend: AttentionBackend, case: AttentionCase, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Partial, Wanted]:
    """Return attention to keys of which those that no query sees are NaN, by the backend and by the reference."""
    (num_heads, dim, value_dim), num_queries, page_size = case.sizes, case.num_queries, case.page_size
    random, num_keys = np.random.default_rng(case.seed), 320
    torch.manual_seed(case.seed)
    keys = torch.full((num_keys // page_size, 2, page_size, dim + 8), torch.nan, dtype=dtype)[:, 1:, :, :dim]
    each = np.tile(np.arange(num_keys), (num_queries, 1))
    selected = torch.from_numpy(random.permuted(each, axis=1)[:, : case.most]).int()
    is_seen = torch.arange(case.most) < torch.from_numpy(random.integers(0, case.most + 1, num_queries))[:, None]
    table = torch.from_numpy(random.permutation(num_keys // page_size))
    query, rows = torch.randn(num_queries, num_heads, dim).to(dtype), torch.randn(num_keys, dim).to(dtype)
    seen = selected[is_seen].long()
    keys[table[seen // page_size], 0, seen % page_size] = rows[seen]
    step = backend.prepare_selection(
        [QueryRun(slice(0, num_queries), table.to(device), np.full(num_queries, num_keys))]
    )
    masked = selected.masked_fill(~is_seen, NO_KEY).to(device)
    out = step.attend(query.to(device), keys.to(device), masked, AttentionParams(0.1, value_dim=value_dim))
    by_row = []
    for row in range(num_queries):
        mine = rows[selected[row][is_seen[row]].long(), None]
        one = np.ones((1, len(mine)), dtype=bool)
        by_row.append(Wanted.of(query[row : row + 1], mine, mine[..., :value_dim], one, scale=0.1))
    return out, Wanted(*(torch.cat(parts) for parts in zip(*by_row, strict=True)))
