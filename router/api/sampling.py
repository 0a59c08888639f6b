"""From a request's fields to how its tokens are drawn, what ends it, and what of it becomes text."""

import secrets
from collections.abc import Collection
from typing import TypeVar

import msgspec

from cluster.spec.sampling import Sampling
from cluster.tokenizer import Tokenizer
from router.api.requests import GenerationRequest
from router.flight import Ask
from router.service import Service
from router.text import TextRules

_SEED_MASK = 2**63 - 1
_T = TypeVar("_T")


def stop_token_ids(service: Service, body: GenerationRequest) -> frozenset[int]:
    """Tokens that end the answer."""
    ended_by = frozenset[int]() if body.ignore_eos else service.tokenizer.eos_ids
    return ended_by | frozenset(body.stop_token_ids or ())


def text_rules(service: Service, body: GenerationRequest, markers: Collection[str] = ()) -> TextRules:
    """How the tokens of every choice become text. markers: texts that are shown even if they are special tokens."""
    is_marked = not service.tokenizer.special_texts.isdisjoint(markers)
    return TextRules(
        stops=body.stops,
        stop_token_ids=stop_token_ids(service, body),
        asked_stop_ids=frozenset(body.stop_token_ids or ()),
        include_stop=body.include_stop,
        skip_special_tokens=body.skip_special_tokens is not False and not is_marked,
        min_tokens=body.min_tokens or 0,
        prompt_only=body.max_tokens == 0,
    )


def make_sampling(service: Service, body: GenerationRequest, ending_ids: frozenset[int], grammar: str = "") -> Sampling:
    """How tokens are drawn; a seed is made up where none is given."""
    tokenizer, defaults = service.tokenizer, service.sampling_defaults
    top_p = given_or(body.top_p, defaults.top_p)
    return Sampling(
        temperature=given_or(body.temperature, defaults.temperature) if top_p else 0.0,
        top_p=top_p or 1.0,
        top_k=max(given_or(body.top_k, defaults.top_k), 0),
        min_p=given_or(body.min_p, defaults.min_p),
        seed=secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK,
        repetition_penalty=given_or(body.repetition_penalty, defaults.repetition_penalty),
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=body.logit_bias or {},
        allowed_ids=frozenset(body.allowed_token_ids or ()),
        bad_words=_bad_words(tokenizer, body.bad_words or []),
        min_tokens=body.min_tokens or 0,
        ending_ids=frozenset(token_id for token_id in ending_ids if token_id < tokenizer.vocab_size)
        if body.min_tokens or grammar
        else frozenset(),
        grammar=grammar,
        num_logprobs=body.num_logprobs,
        num_prompt_logprobs=body.num_prompt_logprobs,
    )


def given_or(given: _T | None, default: _T) -> _T:
    """Null is as if the field were left out."""
    return default if given is None else given


def choices_of(ask: Ask, num_choices: int) -> list[Ask]:
    """The same so many times, but for the seeds; the first one brings the prompt, and tells of it."""
    seeds = [(ask.sampling.seed + choice) & _SEED_MASK for choice in range(1, num_choices)]
    samplings = [msgspec.structs.replace(ask.sampling, seed=seed, num_prompt_logprobs=None) for seed in seeds]
    return [ask, *(msgspec.structs.replace(ask, sampling=sampling, shares_prompt=True) for sampling in samplings)]


def _bad_words(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    """The tokens of each word at the beginning of a text and after a space; what the model cannot say needs no ban."""
    spellings = (spelling for word in words for spelling in (word.lstrip() or word, f" {word.lstrip()}"))
    encoded = (tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings)
    return [list(word) for word in dict.fromkeys(encoded) if word and max(word) < tokenizer.vocab_size]
