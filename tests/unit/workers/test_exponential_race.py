"""Random numbers of tokens: fixed for all time, exponential, independent; and what rounding may change."""

from itertools import pairwise

import torch

from workers.engine import sampler
from workers.engine.sampler import key_of, win_race

CPU = torch.device("cpu")
VOCAB_SIZE, NUM_ROWS = 4096, 1000
KEYS = [14254637482812893, -1480008243099856307, -3623035752330704935]


def exponentials(seed: int, num_rows: int = NUM_ROWS, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return sampler._exponentials(torch.tensor([key_of(seed, position) for position in range(num_rows)]), vocab_size)


def test_the_bits_are_those_of_splitmix64() -> None:
    """In plain Python's own arithmetic."""
    mask = (1 << 64) - 1
    key = key_of(7, 3)
    for token_id, found in enumerate(sampler._exponentials(torch.tensor([key]), 50)[0].tolist()):
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
    ends = torch.tensor([0.0, 1.0]).clamp(sampler._LEAST, sampler._MOST).neg().log1p().neg()
    assert (ends > 0).all()
    assert ends.isfinite().all()


def test_only_what_has_weight_wins() -> None:
    weights = torch.zeros(NUM_ROWS, VOCAB_SIZE)
    weights[:, [5, 4000]] = torch.tensor([1e-30, 2e-30])
    winners = win_race(weights, torch.tensor([key_of(1, position) for position in range(NUM_ROWS)]))
    assert set(winners.tolist()) == {5, 4000}
    assert abs((winners == 4000).double().mean().item() - 2 / 3) < 0.08


def test_rounding_changes_a_draw_as_seldom_as_it_changes_likelihoods() -> None:
    """Not once for every border between two tokens of the vocabulary, of which one is always near."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator)
    change = 1e-3
    keys = torch.tensor([key_of(5, position) for position in range(NUM_ROWS)])
    drawn = [win_race((logits + change * torch.randn(logits.shape, generator=generator)).exp(), keys) for _ in range(5)]
    num_changed = sum(int((one != two).sum()) for one, two in pairwise(drawn))
    assert num_changed < 4 * NUM_ROWS * change * 4
