"""Sampling with kernels gives the same tokens as plain torch, for any filters and scores."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.spec.sampling import Sampling
from tests.fakes.devices import kernels_on_cpu, use_meta_device
from tests.unit.workers.test_sampler import FILTERS, VOCAB_SIZE
from workers.device import device_of
from workers.engine import logits_processors, sampler, token_race
from workers.engine.sampler import DrawSettings, ranked_cutoffs
from workers.engine.token_race import key_of
from workers.kernels import sampling

CHOSEN = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 2, 3, 40, 99, 150, 10_000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    seed=st.integers(0, 99),
)


@st.composite
def logits_of(draw: st.DrawFn, num_rows: int) -> Tensor:
    """Return random logits, or few distinct ones with many ties, some of them forbidden."""
    vocab_size = draw(st.sampled_from([1, 2, 100, 150, 5000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    logits = 3 * torch.randn(num_rows, vocab_size, generator=generator)
    if draw(st.booleans()):
        logits = logits.round()
    forbidden = torch.rand(num_rows, vocab_size, generator=generator) < draw(st.sampled_from([0.0, 0.4]))
    forbidden[:, 0] = False
    return logits.masked_fill(forbidden, -math.inf)


@settings(max_examples=10)
@given(st.data(), st.lists(CHOSEN, min_size=1, max_size=4))
def test_cutoffs_without_ranking(data: st.DataObject, rows: list[Sampling]) -> None:
    scores = data.draw(logits_of(len(rows)))
    scores -= scores.amax(dim=-1, keepdim=True)
    asked = DrawSettings.of(rows, range(len(rows)), range(len(rows)), scores.shape[-1], device_of(scores))
    expected, _ = ranked_cutoffs(scores, asked.top_k, asked.top_p, scores.shape[-1])
    found, is_sure = torch.full((len(rows),), 7.0), torch.zeros(len(rows), dtype=torch.bool)
    sampling.find_cutoffs(scores, asked.top_k, asked.top_p, is_sure, found)
    # If the mass is close to the limit, sums in another order may keep one token more or less.
    for row, least, wanted in zip(scores, found.tolist(), expected.tolist(), strict=True):
        between = row[(row < max(least, wanted)) & (row >= min(least, wanted))]
        assert between.exp().sum() <= 1e-6 * row.exp().sum()


def test_rows_without_sampling_are_unchanged() -> None:
    scores = torch.tensor([[0.0, -1.0, -2.0], [0.0, -1.0, -2.0]])
    found = torch.tensor([5.0, 5.0])
    top_k, top_p = torch.tensor([2, 2]), torch.tensor([1.0, 1.0], dtype=torch.float64)
    sampling.find_cutoffs(scores, top_k, top_p, torch.tensor([True, False]), found)
    assert found.tolist() == [5.0, -1.0]


@settings(max_examples=25)
@given(st.sampled_from([1, 100, 4096, 9000]), st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3))
def test_the_same_clock_rings_first(vocab_size: int, keys: list[int]) -> None:
    scores = torch.rand(len(keys), vocab_size, generator=torch.Generator().manual_seed(vocab_size)).log()
    scores[:, -1] = 0.0
    least = torch.tensor([-math.inf, math.log(0.3), -math.inf])[: len(keys)]
    weights = scores.masked_fill(scores < least[:, None], -math.inf).exp()
    found = sampling.win_race(weights, torch.tensor(keys))
    assert found.tolist() == token_race.win_race(scores, least, torch.tensor(keys)).tolist()


def test_clocks_are_as_exact_near_their_ends() -> None:
    """A race between one token and one with a known time reveals each time to a few parts in a million."""
    keys = torch.tensor([key_of(seed, 0) for seed in range(100)])
    times = token_race._exponentials(keys[:, None] + token_race._steps(2, keys.device))
    for share, winner in ((1 - 4e-6, 0), (1 + 4e-6, 1)):
        weights = torch.stack([times[:, 0], times[:, 1] * share], dim=1)
        assert (sampling.win_race(weights, keys) == winner).all()


def test_tokens_equal_plain_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Sampling(temperature=0.0),
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.7, top_p=0.9, seed=2),
        Sampling(temperature=1.0, top_k=40, seed=3),
        Sampling(temperature=1.5, top_k=2000, top_p=0.8, min_p=0.001, seed=4),
        Sampling(temperature=2.0, top_p=0.99, seed=5),
    ] * 3
    logits = torch.randn(len(rows), 6000, generator=torch.Generator().manual_seed(0))
    expected = sampler.draw(logits, rows, range(len(rows)))
    kernels_on_cpu(monkeypatch)
    assert sampler.draw(logits, rows, range(len(rows))).tolist() == expected.tolist()


def test_sampling_does_not_wait_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors raise if their content is needed."""
    use_meta_device(monkeypatch, has_kernels=True)
    monkeypatch.setattr(sampling, "find_cutoffs", lambda *_: None)
    monkeypatch.setattr(sampling, "win_race", lambda _, keys: torch.empty_like(keys))
    rows = [*FILTERS.values(), Sampling(), Sampling(temperature=1.0, top_k=2000, top_p=0.5), Sampling(top_p=0.5)]
    states: list[Any] = [
        SimpleNamespace(
            sampling=row,
            forbidden=np.arange(VOCAB_SIZE) < 3,
            bias=(np.arange(2), np.ones(2, np.float32)),
            banned=lambda _: {3},
            counts=SimpleNamespace(ids=np.arange(4), counts=np.ones(4, np.float32)),
            grammar=SimpleNamespace(allowed=lambda _: np.ones(VOCAB_SIZE, np.bool_)),
        )
        for row in rows
    ]
    logits = torch.empty(len(rows), VOCAB_SIZE, device="meta")
    logits_processors.process(logits, dict(enumerate(states)), range(len(rows)))
    assert sampler.draw(logits, rows, range(len(rows))).shape == (len(rows),)
    with pytest.raises((RuntimeError, NotImplementedError)):
        logits.nonzero()
