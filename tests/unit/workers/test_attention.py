"""The torch backend against attention by definition, over paged keys with NaN in every slot it must not read."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.spec.errors import UserError
from tests.fakes.attention_oracle import naive_attention
from tests.fakes.kv import kv_pool
from workers.attention import torch_backend
from workers.attention.registry import BACKENDS, load_backend
from workers.context_parallel.merge import Partial
from workers.context_parallel.runs import Run

KV_HEADS, GROUPS, DIM = 2, 3, 8


class Request:
    """q, k, v of one request in float64, exact in bf16."""

    def __init__(self, length: int, seed: int) -> None:
        random = np.random.default_rng((seed, length))
        shapes = ((KV_HEADS * GROUPS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM))
        self.q, self.k, self.v = (np.round(random.normal(size=(length, *shape)) * 16) / 16 for shape in shapes)


def attend(requests: list[Request], runs: list[Run], page_size: int = 4, dtype: torch.dtype = torch.float32) -> Partial:
    """Run the backend over pages in random order, in layer 1 of 2."""
    counts = [-(-len(request.k) // page_size) for request in requests]
    pool = kv_pool(sum(counts), KV_HEADS, 2, page_size, DIM, dtype)
    pool.group("full_attention").fill_(torch.nan)
    pages = np.random.default_rng(1).permutation(sum(counts))
    tables = [torch.from_numpy(part) for part in np.split(pages, np.cumsum(counts)[:-1])]
    for request, table in zip(requests, tables, strict=True):
        place = torch.arange(len(request.k))
        kv = torch.from_numpy(np.stack((request.k, request.v), axis=1)).to(dtype)
        pool.write(1, table[place // page_size] * page_size + place % page_size, kv)
    rows = [requests[run.request].q[p] for run in runs for p in positions(run)]
    query = torch.from_numpy(np.array(rows).reshape(len(rows), KV_HEADS * GROUPS, DIM)).to(dtype)
    step = load_backend("torch").prepare(runs, tables, page_size)
    return step.attend(query, *pool.layer_view(1))


def positions(run: Run) -> list[int]:
    return [run.first_position + j * run.step for j in range(run.count)]


def expected(requests: list[Request], runs: list[Run]) -> np.ndarray:
    rows = [
        naive_attention(r.q[p : p + 1], r.k[: p + 1], r.v[: p + 1])[0]
        for run in runs
        for r in [requests[run.request]]
        for p in positions(run)
    ]
    return np.array(rows).reshape(-1, KV_HEADS * GROUPS, DIM)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Request], list[Run]]:
    requests, runs = [], []
    for number in range(draw(st.integers(1, 4))):
        step = draw(st.integers(1, 4))
        first = draw(st.integers(0, 12))
        count = draw(st.integers(1, 6))
        requests.append(Request(first + step * count + draw(st.integers(0, 5)), number))
        runs.append(Run(number, first, count, step))
    return requests, draw(st.permutations(runs))


@settings(deadline=None, max_examples=60)
@given(steps(), st.sampled_from([1, 4, 16]))
def test_runs_of_any_start_count_and_step(case: tuple[list[Request], list[Run]], page_size: int) -> None:
    requests, runs = case
    result = attend(requests, runs, page_size)
    np.testing.assert_allclose(result.out.numpy(), expected(requests, runs), atol=1e-5)


def test_several_runs_of_one_request_share_its_keys() -> None:
    requests = [Request(30, 0)]
    runs = [Run(0, 20, 5, 1), Run(0, 29, 1, 1), Run(0, 2, 4, 3), Run(0, 0, 1, 1)]
    np.testing.assert_allclose(attend(requests, runs).out.numpy(), expected(requests, runs), atol=1e-5)


def test_single_tokens_of_very_unlike_lengths() -> None:
    requests = [Request(length, length) for length in (1, 2, 150, 37, 151, 5, 64)]
    runs = [Run(number, len(request.k) - 1, 1, 1) for number, request in enumerate(requests)]
    result = attend(requests, runs)
    np.testing.assert_allclose(result.out.numpy(), expected(requests, runs), atol=1e-5)


def test_single_tokens_are_gathered_in_bounded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "_MAX_BATCH_SLOTS", 20)
    requests = [Request(9, seed) for seed in range(5)]
    runs = [Run(number, 8, 1, 1) for number in range(5)]
    np.testing.assert_allclose(attend(requests, runs).out.numpy(), expected(requests, runs), atol=1e-5)


@pytest.mark.parametrize("run", [Run(0, 0, 9, 1), Run(0, 3, 6, 1), Run(0, 1, 3, 3), Run(0, 8, 1, 1)])
def test_lse_is_the_natural_log_of_the_weights_sum(run: Run) -> None:
    request = Request(9, 3)
    result = attend([request], [run])
    for row, position in enumerate(positions(run)):
        for head in range(KV_HEADS * GROUPS):
            scores = request.k[: position + 1, head // GROUPS] @ request.q[position, head] / np.sqrt(DIM)
            assert float(result.lse[row, head]) == pytest.approx(np.log(np.exp(scores).sum()), abs=1e-5)
    assert result.lse.dtype == torch.float32


def test_bf16_stays_close_and_keeps_its_dtype() -> None:
    requests = [Request(40, 0), Request(17, 1), Request(12, 2)]
    runs = [Run(0, 8, 32, 1), Run(1, 16, 1, 1), Run(2, 11, 1, 1)]
    result = attend(requests, runs, dtype=torch.bfloat16)
    assert (result.out.dtype, result.lse.dtype) == (torch.bfloat16, torch.float32)
    np.testing.assert_allclose(result.out.float().numpy(), expected(requests, runs), atol=0.03)


def test_no_runs_yield_no_rows() -> None:
    assert attend([Request(3, 0)], []).out.shape == (0, KV_HEADS * GROUPS, DIM)


def test_a_step_can_be_used_for_every_layer_and_changes_no_page() -> None:
    pool = kv_pool(2, KV_HEADS, 2, 4, DIM, torch.float32)
    pool.group("full_attention").normal_()
    before = pool.group("full_attention").clone()
    step = load_backend("torch").prepare([Run(0, 4, 1, 1), Run(1, 1, 1, 1)], [torch.tensor([0, 1])] * 2, 4)
    query = torch.randn(2, KV_HEADS * GROUPS, DIM)
    first, other, again = (step.attend(query, *pool.layer_view(layer)).out for layer in (0, 1, 0))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert torch.equal(pool.group("full_attention"), before)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="'abacus'; allowed: " + ", ".join(sorted(BACKENDS))):
        load_backend("abacus")
