"""Sampling: the filters, and an exponential race that depends on seed, position and token only."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper
from transformers import TopPLogitsWarper as TransformersTopP

from cluster.spec.sampling import Sampling
from workers import device
from workers.device import CPU, GPU
from workers.engine import sampler, token_race
from workers.engine.sampler import DrawSettings
from workers.engine.token_race import key_of, win_race

VOCAB_SIZE = 40
NUM_DRAWS = 4000

FILTERS = {
    "plain": Sampling(temperature=1.0),
    "hot": Sampling(temperature=2.5),
    "cold": Sampling(temperature=0.4),
    "top-k": Sampling(temperature=1.0, top_k=5),
    "top-p": Sampling(temperature=1.0, top_p=0.6),
    "tiny-top-p": Sampling(temperature=1.0, top_p=1e-6),
    "min-p": Sampling(temperature=1.5, min_p=0.2),
    "all": Sampling(temperature=1.3, top_k=12, top_p=0.9, min_p=0.05),
}


def draw(logits: Tensor, rows: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    token_ids: list[int] = sampler.draw(logits, rows, positions).tolist()
    return token_ids


def some_logits(num_rows: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def transformers_likelihoods(logits: Tensor, row: Sampling) -> Tensor:
    chain = LogitsProcessorList([TemperatureLogitsWarper(row.temperature)])
    if row.top_k:
        chain.append(TopKLogitsWarper(row.top_k))
    if row.top_p < 1:
        chain.append(TransformersTopP(row.top_p))
    if row.min_p:
        chain.append(MinPLogitsWarper(row.min_p))
    return chain(torch.LongTensor([[0]]), logits[None]).softmax(-1)[0]


@pytest.mark.parametrize("name", FILTERS)
def test_samples_follow_the_likelihoods_of_transformers(name: str) -> None:
    logits, row = some_logits(1)[0], replace(FILTERS[name], seed=11)
    expected = transformers_likelihoods(logits, row)
    sampled = draw(logits.expand(NUM_DRAWS, -1), [row] * NUM_DRAWS, range(NUM_DRAWS))
    counts = Counter(sampled)
    assert all(expected[token_id] > 0 for token_id in counts), "a filtered token was sampled"
    observed = torch.tensor([counts[token_id] / NUM_DRAWS for token_id in range(VOCAB_SIZE)])
    # Five standard deviations of a binomial share.
    assert ((observed - expected).abs() <= 5 * (expected * (1 - expected) / NUM_DRAWS).sqrt() + 1e-6).all()


@settings(max_examples=100, deadline=None)
@example(top_k=5, top_p=0.5, levels=3, num_ranked=(3, 5), seed=2)
@given(
    top_k=st.sampled_from([0, 2, 5, 39, 40, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    levels=st.sampled_from([3, 1000]),
    num_ranked=st.tuples(st.integers(1, VOCAB_SIZE), st.integers(1, VOCAB_SIZE)),
    seed=st.integers(0, 99),
)
def test_filtered_tokens_equal_a_full_ranking(
    top_k: int, top_p: float, levels: int, num_ranked: tuple[int, int], seed: int
) -> None:
    """The result does not depend on how many tokens are sorted at first, even with many ties."""
    scores = (some_logits(4, seed) * levels).round() / levels
    scores -= scores.amax(dim=-1, keepdim=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_FIRST_ON_CPU", num_ranked[0])
        patch.setattr(sampler, "_NUM_RANKED", num_ranked[1])
        rows = [Sampling(temperature=1.0, top_k=top_k, top_p=top_p)] * 4
        asked = DrawSettings.of(rows, range(4), range(4), VOCAB_SIZE, CPU)
        kept = scores >= sampler.least_likely(scores, asked)[:, None]
    for row in range(4):
        ranked = sorted(scores[row].double().tolist(), reverse=True)[: top_k or None]
        mass, total, least = 0.0, sum(map(math.exp, ranked)), ranked[0]
        for score in ranked:
            # If the mass equals top-p except for rounding, both results are right.
            assume(top_p == 1 or abs(mass - top_p * total) > 1e-5 * total)
            if top_p < 1 and mass >= top_p * total:
                break
            least, mass = score, mass + math.exp(score)
        assert kept[row].tolist() == (scores[row] >= least).tolist()


@pytest.mark.parametrize("row", [Sampling(temperature=50.0, top_p=0.5), Sampling(temperature=1.0, top_k=7)])
def test_rounding_does_not_change_the_kept_ties(row: Sampling) -> None:
    rows = [replace(row, seed=seed) for seed in range(50)]
    exact = torch.zeros(50, VOCAB_SIZE)
    rounded = exact + 1e-5 * some_logits(50)
    assert draw(exact, rows, [0] * 50) == draw(rounded, rows, [0] * 50)


def test_top_k_of_one_is_greedy_among_equals() -> None:
    assert draw(torch.zeros(20, VOCAB_SIZE), [Sampling(temperature=1.0, top_k=1)] * 20, range(20)) == [0] * 20


def test_greedy_picks_the_likeliest_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 5.0, 1.0], [-9.0, -8.0, -7.0]])
    assert draw(logits, [Sampling()] * 3, [0, 5, 9]) == [1, 0, 2]


def test_greedy_ignores_seed_and_filters() -> None:
    logits = some_logits(6)
    rows = [Sampling(temperature=0.0, top_k=3, top_p=0.2, min_p=0.5, seed=seed) for seed in range(6)]
    assert draw(logits, rows, range(6)) == logits.argmax(-1).tolist()


def test_no_rows() -> None:
    assert draw(torch.empty(0, VOCAB_SIZE), [], []) == []


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-30, 1e-320])
def test_a_tiny_temperature_is_greedy_without_overflow(temperature: float) -> None:
    logits = 1000 * some_logits(8)
    rows = [Sampling(temperature=temperature, top_p=0.9, seed=seed) for seed in range(8)]
    assert draw(logits, rows, range(8)) == logits.argmax(-1).tolist()


def test_masked_tokens_are_never_sampled() -> None:
    logits = torch.full((200, VOCAB_SIZE), float("-inf"))
    logits[:, [3, 39]] = 0.0
    sampled = draw(logits, [Sampling(temperature=1.0, top_k=10, seed=2)] * 200, range(200))
    assert set(sampled) == {3, 39}


row_strategy = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 4, 40, 1000]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(-(2**63), 2**64),
)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(st.tuples(row_strategy, st.integers(0, 10**6)), min_size=1, max_size=9), seed=st.integers(0, 1000)
)
def test_a_row_is_sampled_independently_of_its_batch(batch: list[tuple[Sampling, int]], seed: int) -> None:
    logits = some_logits(len(batch), seed)
    rows, positions = [row for row, _ in batch], [position for _, position in batch]
    together = draw(logits, rows, positions)
    alone = [draw(logits[i : i + 1], rows[i : i + 1], positions[i : i + 1])[0] for i in range(len(batch))]
    assert together == alone
    assert draw(logits.flip(0), rows[::-1], positions[::-1]) == together[::-1]


def test_seed_and_position_both_matter() -> None:
    logits = torch.zeros(50, VOCAB_SIZE)
    fixed_seed = draw(logits, [Sampling(temperature=1.0, seed=1)] * 50, range(50))
    other_seed = draw(logits, [Sampling(temperature=1.0, seed=2)] * 50, range(50))
    fixed_position = draw(logits, [Sampling(temperature=1.0, seed=seed) for seed in range(50)], [0] * 50)
    assert len(set(fixed_seed)) > 20
    assert len(set(fixed_position)) > 20
    assert fixed_seed != other_seed


def test_sampled_tokens_are_copied_to_the_host_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the copy would wait for the next step, which can begin before anybody reads the tokens."""
    events: list[str] = []

    class OnGpu(Tensor):
        """Tensor on a GPU."""

    class Stream:
        def record_event(self) -> "Stream":
            events.append("recorded")
            return self

        def synchronize(self) -> None:
            events.append("awaited")

    def empty_pinned(like: Tensor, *, device: str, pin_memory: bool) -> Tensor:
        assert (device, pin_memory) == ("cpu", True)
        events.append("copied")
        return torch.empty(like.shape, dtype=like.dtype)

    def draw_on_gpu(*_: object) -> Tensor:
        return torch.tensor([1, 2]).as_subclass(OnGpu)

    monkeypatch.setattr(torch, "empty_like", empty_pinned)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(sampler, "draw", draw_on_gpu)
    monkeypatch.setattr(device, "device_of", lambda tensor: GPU if isinstance(tensor, OnGpu) else CPU)
    draws = sampler.begin_sample(some_logits(2), [Sampling(num_logprobs=2)] * 2, {}, [0, 0])
    assert events == ["copied"] * 5 + ["recorded"]
    draws.token_ids.zero_()  # as the next step may do
    assert [sampled.token_id for sampled in draws.wait()] == [1, 2]
    assert events[6:] == ["awaited"]


LARGE_VOCAB_SIZE, NUM_ROWS = 4096, 1000
NO_LIMITS = torch.full((NUM_ROWS,), -torch.inf)
KEYS = [14254637482812893, -1480008243099856307, -3623035752330704935]


def exponentials(seed: int, num_rows: int = NUM_ROWS, vocab_size: int = LARGE_VOCAB_SIZE) -> torch.Tensor:
    keys = torch.tensor([key_of(seed, position) for position in range(num_rows)])
    return token_race._exponentials(keys[:, None] + token_race._steps(vocab_size, keys.device))


def test_the_bits_equal_splitmix64() -> None:
    """The expected bits come from plain Python arithmetic."""
    mask = (1 << 64) - 1
    key = key_of(7, 3)
    for token_id, found in enumerate(exponentials(7, 4, 50)[3].tolist()):
        bits = (key + (token_id + 1) * 0x9E3779B97F4A7C15) & mask
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & mask
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & mask
        bits ^= bits >> 31
        fraction = torch.tensor((bits >> 11) / 2**53, dtype=torch.float64)
        torch.testing.assert_close(torch.tensor(found), (-torch.log1p(-fraction)).float(), rtol=1e-6, atol=1e-9)


def test_keys_are_fixed_for_all_time() -> None:
    assert [key_of(seed, position) for seed, position in ((7, 0), (7, 1), (-1, 0))] == KEYS


def test_clocks_are_exponential_and_do_not_know_of_each_other() -> None:
    times = exponentials(1)
    for threshold in (0.01, 0.5, 1.0, 3.0, 8.0):
        share = (times < threshold).double().mean().item()
        expected = 1 - torch.tensor(-threshold).exp().item()
        assert abs(share - expected) < 5 * (expected * (1 - expected) / times.numel()) ** 0.5
    others = exponentials(2)
    for one, two in ((times[:, 1:], times[:, :-1]), (times[1:], times[:-1]), (times, others), (times, times.flip(1))):
        correlation = ((one - 1) * (two - 1)).double().mean().item()
        assert abs(correlation) < 6 / one.numel() ** 0.5


def test_no_clock_stands_still_or_rings_at_once() -> None:
    times = exponentials(3)
    assert (times > 0).all()
    assert times.isfinite().all()
    ends = torch.tensor([0.0, 1.0]).clamp(token_race._LEAST, token_race._MOST).neg().log1p().neg()
    assert (ends > 0).all()
    assert ends.isfinite().all()


def test_only_tokens_with_weight_win() -> None:
    scores = torch.full((NUM_ROWS, LARGE_VOCAB_SIZE), -torch.inf)
    scores[:, [5, 4000]] = torch.tensor([1e-30, 2e-30]).log()
    winners = win_race(scores, NO_LIMITS, torch.tensor([key_of(1, position) for position in range(NUM_ROWS)]))
    assert set(winners.tolist()) == {5, 4000}
    assert abs((winners == 4000).double().mean().item() - 2 / 3) < 0.08


@settings(max_examples=30)
@given(st.lists(st.sampled_from([-math.inf, -4.0, -2.0, -1.0, 0.0]), min_size=1, max_size=6), st.integers(0, 99))
def test_a_limit_changes_no_time(least: list[float], seed: int) -> None:
    """The tokens that can be sampled race as they would among all others."""
    scores = some_logits(len(least), seed)
    scores -= scores.amax(dim=-1, keepdim=True)
    limits, keys = torch.tensor(least), torch.tensor([key_of(seed, position) for position in range(len(least))])
    can_be_sampled = scores >= limits[:, None]
    earliness = scores.exp() / exponentials(seed, len(least), VOCAB_SIZE)
    expected = earliness.masked_fill(~can_be_sampled, 0.0).argmax(dim=-1)
    assert win_race(scores, limits, keys).tolist() == expected.tolist()


@pytest.mark.parametrize("name", FILTERS)
def test_logits_that_are_not_numbers_have_a_winner(name: str) -> None:
    """Requests with such logits fail, and the others of the batch do not."""
    logits, row = some_logits(3), replace(FILTERS[name], seed=1)
    expected = draw(logits, [row] * 3, range(3))
    logits[1] = math.nan
    first, second, third = draw(logits, [row] * 3, range(3))
    assert [first, third] == expected[::2]
    assert 0 <= second < VOCAB_SIZE


def test_rounding_changes_tokens_as_rarely_as_likelihoods() -> None:
    """A draw is not affected by the borders between tokens of the vocabulary, one of which is always close."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(NUM_ROWS, LARGE_VOCAB_SIZE, generator=generator)
    change = 1e-3
    keys = torch.tensor([key_of(5, position) for position in range(NUM_ROWS)])
    changes = (change * torch.randn(logits.shape, generator=generator) for _ in range(5))
    kept = [win_race(logits + each, NO_LIMITS, keys) for each in changes]
    num_changed = sum(int((one != two).sum()) for one, two in pairwise(kept))
    assert num_changed < 4 * NUM_ROWS * change * 4
