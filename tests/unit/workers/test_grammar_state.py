"""Grammar constraints combined with all other sampling options."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from cluster.grammar import Grammars
from cluster.spec.ids import Room
from cluster.spec.sampling import Sampled, Sampling
from cluster.spec.step_messages import NewRequest
from tests.fakes.model_folder import EOS, VOCAB_SIZE, write_model_folder
from workers.engine.logits_processors import SamplingState
from workers.engine.sampler import begin_sample

PROMPT = [1, 2, 3]


def asked(lark: str, **fields: Any) -> Sampling:
    grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
    return Sampling(grammar=grammar, **{"ending_ids": frozenset({EOS}), **fields})


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grammars]:
    grammars = Grammars(write_model_folder(tmp_path_factory.mktemp("model")), VOCAB_SIZE)
    yield grammars
    grammars.close()


def state_of(grammars: Grammars, sampling: Sampling, output: bytes = b"") -> SamplingState:
    history = [*PROMPT, *output]
    new = NewRequest(room=Room(1), prompt_len=3, owner_base=0, sampling=sampling, history=history, destination=None)
    return SamplingState(new, VOCAB_SIZE, grammars)


def draw(state: SamplingState, position: int, likes: str | int = "!") -> Sampled:
    """Return a token sampled from logits that prefer one token, then low ids."""
    logits = -torch.arange(VOCAB_SIZE, dtype=torch.float32)[None] / 100
    logits[0, ord(likes) if isinstance(likes, str) else likes] = 9.0
    return begin_sample(logits, [state.sampling], {0: state}, [position]).wait()[0]


def text_of(state: SamplingState, num_tokens: int, likes: str | int = "!", first: int = 0) -> str:
    """Return up to a number of characters, with "$" at the end of the answer, or "." if the grammar ended it."""
    text = ""
    for position in range(first, first + num_tokens):
        sampled = draw(state, position, likes)
        assert sampled.problem == ""
        if sampled.token_id == EOS:
            return text + "$"
        text += chr(sampled.token_id)
        if sampled.completes_grammar:
            return text + "."
    return text


def test_the_most_likely_allowed_token_is_sampled(grammars: Grammars) -> None:
    assert text_of(state_of(grammars, asked('start: "x" /[a-c]/ "y" | "xx"')), 9, "b") == "xby."


def test_an_answer_may_end_where_the_text_is_whole(grammars: Grammars) -> None:
    likes_end = state_of(grammars, asked("start: /ab*/"))
    assert text_of(likes_end, 9, EOS) == "a$"
    assert text_of(state_of(grammars, asked("start: /ab*/")), 4, "!") == "abbb"


def test_min_tokens_apply_while_the_grammar_can_continue(grammars: Grammars) -> None:
    assert text_of(state_of(grammars, asked("start: /ab*/", min_tokens=3)), 9, EOS) == "abb$"
    assert text_of(state_of(grammars, asked('start: "ab"', min_tokens=3)), 9, EOS) == "ab."


def test_a_handoff_or_a_preemption_continues_the_grammar(grammars: Grammars) -> None:
    sampling = asked('start: "abcdef"')
    assert text_of(state_of(grammars, sampling, b"abcd"), 9, first=4) == "ef."


def test_other_sampling_options_apply_within_the_grammar(grammars: Grammars) -> None:
    digits = asked("start: /[0-9]{4}/")
    assert text_of(state_of(grammars, replace(digits, allowed_ids=frozenset(b"78a"))), 9) == "7777."
    assert text_of(state_of(grammars, replace(digits, allowed_ids=frozenset(b"xyz"))), 9, "3") == "3333."
    assert text_of(state_of(grammars, replace(digits, bad_words=[[*b"00"]])), 9) == "0101."
    assert text_of(state_of(grammars, replace(digits, logit_bias={ord("5"): 50.0, ord("a"): 100.0})), 9) == "5555."
    assert text_of(state_of(grammars, replace(digits, frequency_penalty=2.0)), 9) == "0123."


def test_logprobs_are_the_models_own(grammars: Grammars) -> None:
    sampled = draw(state_of(grammars, replace(asked('start: "a"'), num_logprobs=1)), 0, "z")
    assert sampled.token_id == ord("a")
    assert sampled.logprobs is not None
    assert sampled.logprobs.top_ids == [ord("z")]
    assert sampled.logprobs.logprob < sampled.logprobs.top_logprobs[0] - 5


def test_requests_without_a_grammar_are_unchanged(grammars: Grammars) -> None:
    constrained = state_of(grammars, asked('start: "a"'))
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    likeliest = int(logits[1].argmax())
    sampled = begin_sample(logits, [constrained.sampling, Sampling()], {0: constrained}, [0, 0]).wait()
    assert [each.token_id for each in sampled] == [ord("a"), likeliest]


def test_a_token_that_ends_the_answer_does_not_end_the_text_early(grammars: Grammars) -> None:
    sampling = asked('start: "a" /[b;]/ "c"', ending_ids=frozenset({EOS, ord(";")}))
    assert text_of(state_of(grammars, sampling), 9, ";") == "abc."


@pytest.mark.parametrize(
    ("sampling", "output", "words"),
    [
        (asked('start: "a;b"', ending_ids=frozenset({ord(";")})), b"a", "only tokens that end the answer fit"),
        (asked('start: "abc"'), b"ax", "doesn't satisfy the grammar"),
        (asked("start: nothing"), b"", "nothing"),
    ],
)
def test_a_dead_end_fails_only_its_request(grammars: Grammars, sampling: Sampling, output: bytes, words: str) -> None:
    sampled = draw(state_of(grammars, sampling, output), len(output))
    assert sampled.problem.startswith("the grammar cannot be followed: ")
    assert words in sampled.problem


def test_a_grammar_that_grows_too_complex_fails_by_itself(grammars: Grammars) -> None:
    output = bytes(random.Random(1).choices(b"ab", k=3000))
    sampled = draw(state_of(grammars, asked("start: /(.*a.{500}){20}/"), output), len(output))
    assert "lexer" in sampled.problem
