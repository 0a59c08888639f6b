"""Logits processors compared with transformers', and errors for invalid parameters."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitNormalization,
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from cluster.spec.ids import Room
from cluster.spec.sampling import Sampled, Sampling
from cluster.spec.step_messages import NewRequest
from workers.engine.logits_processors import SamplingState, process
from workers.engine.sampler import begin_sample

VOCAB_SIZE = 40
PROMPT = [3, 5, 5, 7, 9]
OUTPUT = [7, 11, 11, 12]


def state_of(sampling: Sampling, prompt: list[int] = PROMPT, output: list[int] = OUTPUT) -> SamplingState:
    history = [*prompt, *output] if sampling.looks_back else []
    new = NewRequest(
        room=Room(1), prompt_len=len(prompt), owner_base=0, sampling=sampling, history=history, destination=None
    )
    return SamplingState(new, VOCAB_SIZE)


def some_logits(num_rows: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def sample(logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> list[Sampled]:
    changing = {row: state for row, state in enumerate(states) if state.sampling.changes_logits}
    return begin_sample(logits, [state.sampling for state in states], changing, positions).wait()


def processed(logits: Tensor, sampling: Sampling, position: int = len(OUTPUT)) -> Tensor:
    changed = logits[None].clone()
    process(changed, {0: state_of(sampling)}, [position])
    return changed[0]


BANNED = [[11, 12, 30], [12, 31], [5, 32], [33], [9, 7, 11, 11, 12, 34], [11, 35]]
THEIRS: list[tuple[Sampling, LogitsProcessor]] = [
    (Sampling(repetition_penalty=1.7), RepetitionPenaltyLogitsProcessor(1.7)),
    (Sampling(repetition_penalty=0.6), RepetitionPenaltyLogitsProcessor(0.6)),
    (Sampling(bad_words=BANNED), NoBadWordsLogitsProcessor(BANNED, eos_token_id=[])),
    (
        Sampling(min_tokens=5, ending_ids=frozenset({2, 8})),
        MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, [2, 8]),
    ),
    (
        Sampling(min_tokens=4, ending_ids=frozenset({2, 8})),
        MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, [2, 8]),
    ),
    (Sampling(logit_bias={4: 2.5, 6: -100.0}), SequenceBiasLogitsProcessor([[[4], 2.5], [[6], -100.0]])),
    (
        Sampling(allowed_ids=frozenset({1, 7, 39})),
        SuppressTokensLogitsProcessor([token_id for token_id in range(VOCAB_SIZE) if token_id not in {1, 7, 39}]),
    ),
]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_reported(value: float) -> None:
    rows = [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.5, top_k=3), Sampling(min_p=0.1)]
    rows.append(Sampling(repetition_penalty=1.3, logit_bias={4: 1.0}, num_logprobs=2))
    logits = some_logits(2 * len(rows))
    logits[::2] = value
    logits[1::2, 9] = -math.inf  # as of a token that the model never produces
    sampled = sample(logits, [state_of(row) for row in rows for _ in range(2)], [0] * len(logits))
    assert [each.is_corrupted for each in sampled] == [True, False] * len(rows)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_logit_that_is_not_finite_is_reported(value: float) -> None:
    rows = [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=3)]
    logits = some_logits(len(rows))
    logits[:, 9] = value
    assert all(each.is_corrupted for each in sample(logits, [state_of(row) for row in rows], [0] * len(rows)))


@pytest.mark.parametrize(("sampling", "theirs"), THEIRS)
def test_logits_equal_transformers(sampling: Sampling, theirs: LogitsProcessor) -> None:
    logits = some_logits(1)[0]
    expected = theirs(torch.tensor([[*PROMPT, *OUTPUT]]), logits[None].clone())[0]
    assert torch.equal(processed(logits, sampling), expected)


def test_frequency_and_presence_count_only_the_output() -> None:
    logits = some_logits(1)[0]
    expected = logits.clone()
    for token_id, count in ((7, 1), (11, 2), (12, 1)):
        expected[token_id] = logits[token_id] - 0.4 * count - 0.25
    changed = processed(logits, Sampling(frequency_penalty=0.4, presence_penalty=0.25))
    assert torch.allclose(changed, expected, rtol=0, atol=1e-6)


def test_bias_comes_before_penalties_and_nothing_revives_a_ban() -> None:
    logits = torch.full((VOCAB_SIZE,), -1.0)
    sampling = Sampling(
        logit_bias={7: 3.0, 33: 100.0}, bad_words=[[33]], repetition_penalty=2.0, frequency_penalty=-2.0
    )
    changed = processed(logits, sampling)
    assert changed[7] == (-1 + 3) / 2 + 2
    assert changed[5] == -1 * 2
    assert changed[33] == -math.inf


def test_bans_that_leave_no_token_are_not_applied() -> None:
    logits = some_logits(1)[0]
    allowed = Sampling(allowed_ids=frozenset({8, 9}), bad_words=[[8], [12, 9]])
    changed = processed(logits, allowed)
    assert [token_id for token_id in range(VOCAB_SIZE) if changed[token_id] > -math.inf] == [8, 9]


def test_sampled_tokens_count_immediately() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 20], logits[0, 21] = 1.0, 0.3
    states = [state_of(Sampling(frequency_penalty=0.2, bad_words=[[20, 21, 20]]), output=[])]
    sampled = [sample(logits.clone(), states, [position])[0].token_id for position in range(7)]
    # 20 falls by 0.2 per token to 0.2, below the 0.3 of 21. Then it is banned once, and 21 wins at 0.1.
    assert sampled == [20, 20, 20, 20, 21, 21, 20]


class TestLogprobs:
    def test_they_are_the_models_own_and_equal_transformers(self) -> None:
        logits = some_logits(3)
        expected = LogitNormalization()(torch.zeros(3, 1, dtype=torch.int64), logits.clone())
        samplings = [
            Sampling(num_logprobs=4, logit_bias={17: 100.0}),
            Sampling(frequency_penalty=1.0),
            Sampling(num_logprobs=0, temperature=3.0, top_k=2, seed=4),
        ]
        biased, untold, bare = sample(logits.clone(), [state_of(sampling) for sampling in samplings], [4, 4, 4])
        assert untold.logprobs is None
        assert biased.logprobs is not None
        assert bare.logprobs is not None
        assert biased.token_id == 17
        assert biased.logprobs.logprob == pytest.approx(float(expected[0, 17]))
        top = expected[0].topk(4)
        assert biased.logprobs.top_ids == top.indices.tolist()
        assert biased.logprobs.top_logprobs == pytest.approx(top.values.tolist())
        assert bare.logprobs.logprob == pytest.approx(float(expected[2, bare.token_id]))
        assert (bare.logprobs.top_ids, bare.logprobs.top_logprobs) == ([], [])

    def test_more_than_the_vocabulary_has(self) -> None:
        (reported,) = sample(some_logits(1), [state_of(Sampling(num_logprobs=1000))], [0])
        assert reported.logprobs is not None
        assert len(reported.logprobs.top_ids) == VOCAB_SIZE


ids = st.integers(0, VOCAB_SIZE - 1)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    logit_bias=st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=3),
    allowed_ids=st.frozensets(ids, max_size=4),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 6),
    ending_ids=st.frozensets(ids, max_size=3),
    num_logprobs=st.sampled_from([None, 0, 3]),
)
requests = st.tuples(samplings, st.lists(ids, min_size=1, max_size=6), st.lists(ids, max_size=6))


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(requests, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_a_request_is_sampled_independently_of_its_batch(batch: list[tuple[Any, ...]], seed: int) -> None:
    logits = some_logits(len(batch), seed)
    positions = [len(output) for _, _, output in batch]
    together = sample(logits.clone(), [state_of(*request) for request in batch], positions)
    alone = [sample(logits[i : i + 1].clone(), [state_of(*batch[i])], [positions[i]])[0] for i in range(len(batch))]
    assert together == alone
    for (sampling, _, output), sampled in zip(batch, together, strict=True):
        assert sampled.token_id in (sampling.allowed_ids or range(VOCAB_SIZE))
        if sampling.allowed_ids - sampling.ending_ids and len(output) < sampling.min_tokens and not sampling.bad_words:
            assert sampled.token_id not in sampling.ending_ids


def test_unused_processors_leave_logits_unchanged() -> None:
    logits = some_logits(4)
    before = logits.clone()
    sampling = Sampling(temperature=1.0, top_k=3)
    assert not sampling.changes_logits
    process(logits, dict.fromkeys(range(4), state_of(sampling)), [0, 1, 2, 3])
    assert torch.equal(logits, before)
