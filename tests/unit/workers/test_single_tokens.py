"""Single tokens over many keys: all scores, one softmax, all values, in blocks so small that few keys need many."""

import numpy as np
import pytest
import torch

from tests.unit.workers.test_attention import GROUPS, KV_HEADS, Request, attend, expected
from workers.attention import single_tokens, torch_backend
from workers.context_parallel.runs import Run

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_tokens, "MIN_SLOTS", 1)
    monkeypatch.setattr(single_tokens, "MIN_SLOTS_FP32", 1)
    monkeypatch.setattr(single_tokens, "BLOCK_SLOTS", 24)
    monkeypatch.setattr(single_tokens, "_SAMPLE", 3)
    monkeypatch.setattr(single_tokens, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(torch_backend, "_MAX_BATCH_SLOTS", 200)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize(
    "lengths", [(1,), (24,), (25,), (130,), (1, 2, 150, 37, 151, 5, 64), (40, 41, 42, 39)], ids=str
)
def test_batches_of_any_lengths(lengths: tuple[int, ...], page_size: int, dtype: torch.dtype) -> None:
    requests = [Request(length, seed) for seed, length in enumerate(lengths)]
    runs = [Run(number, length - 1, 1, 1) for number, length in enumerate(lengths)]
    result = attend(requests, runs, page_size, dtype)
    assert (result.out.dtype, result.lse.dtype) == (dtype, torch.float32)
    np.testing.assert_allclose(result.out.double().numpy(), expected(requests, runs), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_token_in_the_midst_of_its_request_sees_nothing_after_it(dtype: torch.dtype) -> None:
    requests, runs = [Request(100, 7), Request(90, 8)], [Run(0, 61, 1, 1), Run(1, 50, 1, 1)]
    result = attend(requests, runs, dtype=dtype)
    np.testing.assert_allclose(result.out.double().numpy(), expected(requests, runs), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_lse_is_the_natural_log_of_the_weights_sum(dtype: torch.dtype) -> None:
    request = Request(77, 3)
    result = attend([request], [Run(0, 76, 1, 1)], dtype=dtype)
    scores = (
        np.einsum("hgd,shd->hgs", request.q[76].reshape(KV_HEADS, GROUPS, -1), request.k) / request.q.shape[2] ** 0.5
    )
    np.testing.assert_allclose(result.lse[0], np.log(np.exp(scores).sum(-1)).flatten(), atol=TOLERANCE[dtype] / 2)


def test_bf16_scores_far_from_zero_keep_their_differences() -> None:
    request = Request(90, 4)
    request.k[:, :, 0] = 64.0
    request.q[:, :, 0] = 16.0
    result = attend([request], [Run(0, 89, 1, 1)], dtype=torch.bfloat16)
    np.testing.assert_allclose(result.out.double().numpy(), expected([request], [Run(0, 89, 1, 1)]), atol=0.05)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_needle_far_above_the_reference_takes_all_the_weight(dtype: torch.dtype) -> None:
    request = Request(90, 5)
    request.q[89] = 16.0
    request.k[:] = 0.0
    request.k[60] = 64.0
    result = attend([request], [Run(0, 89, 1, 1)], dtype=dtype)
    wanted = np.repeat(request.v[60], GROUPS, axis=0)
    np.testing.assert_allclose(result.out[0].double().numpy(), wanted, atol=TOLERANCE[dtype])
