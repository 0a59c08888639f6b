"""Conversion of a valid body to requests: tokens, limits and sampling, checked against the model."""

import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from cluster.channel import MAX_FRAME_BYTES
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.wire import TokenIds
from cluster.tokenizer import Tokenizer
from router.errors import ApiError, bad_request
from router.preprocess.body import refuse_unsupported, shortened
from router.preprocess.constrain import grammar_of, wanted_answer
from router.preprocess.model import ServedModel
from router.preprocess.requests import CompletionRequest, GenerationBody
from router.request import GenerateRequest
from router.text import TextRules

MAX_PROMPTS = 1024
MAX_RULE_BYTES = 32 << 20
"""Maximum size of the sampling rules in the messages of all choices together."""
MAX_REPEATED_TOKENS = 1 << 20
"""Maximum number of prompt tokens in one response, which is encoded in one piece, counted once for each choice."""
_BIAS_BYTES, _ID_BYTES = 14, 5
"""Maximum number of message bytes of a biased token, and of a token in a list."""

_TOO_LONG = "context_length_exceeded"
_LOGPROBS_BYTES, _TOP_LOGPROB_BYTES = 64, 14
"""Maximum number of message bytes per prompt token, and for each of the most likely tokens at its position."""
_FEW = 64
"""Number of ids below which numpy is slower than ``min`` and ``max``."""
SEED_MASK = 2**63 - 1
_T = TypeVar("_T")


def check_model(model: ServedModel, asked: str | None) -> None:
    if asked is not None and asked != model.name:
        message = f"the model {shortened(repr(asked))} does not exist; this endpoint serves {model.name!r}"
        raise ApiError(HTTPStatus.NOT_FOUND, message, "model", "model_not_found")


def check(model: ServedModel, body: GenerationBody) -> None:
    """Reject unsupported fields and combinations."""
    check_model(model, body.model)
    refuse_unsupported(body.others)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: only allowed with stream=true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs: not supported with stream=true", "prompt_logprobs")
    for param, token_ids in (("logit_bias", body.logit_bias), ("allowed_token_ids", body.allowed_token_ids)):
        if token_ids is not None:
            pack_token_ids(model, token_ids, param)


def completion_requests(model: ServedModel, body: CompletionRequest, max_tokens: int) -> list[GenerateRequest]:
    """Return a request for every prompt. Prompt and answer together may have ``max_tokens`` tokens."""
    check(model, body)
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise bad_request("max_tokens: 0 is only allowed together with echo or prompt_logprobs", "max_tokens")
    prompts = _prompt_ids(model, body)
    _check_repeats(body, sum(map(len, prompts)))
    if body.trace and len(prompts) > 1:
        raise bad_request(f"trace: at most one prompt can be traced, got {len(prompts)}", "trace")
    grammar = grammar_of(model, lambda: wanted_answer(body))
    return make_requests(model, body, prompts, max_tokens, grammar)


def _check_repeats(body: CompletionRequest, num_tokens: int) -> None:
    """Reject a response that repeats too many prompt tokens."""
    width = 1 + (body.num_prompt_logprobs or 0)
    if not (body.echo or body.return_token_ids or body.num_prompt_logprobs is not None):
        return
    if num_tokens * body.num_choices * width > MAX_REPEATED_TOKENS:
        param = "echo" if body.echo else "return_token_ids" if body.return_token_ids else "prompt_logprobs"
        got = f"{num_tokens} prompt tokens with {body.num_choices} choices each"
        most = f"at most {MAX_REPEATED_TOKENS // width} prompt tokens in all choices of a response together"
        raise bad_request(f"{param}: got {got}; allowed: {most}", param)


def token_ids_of(model: ServedModel, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
    """Tokenize a text. Raises ApiError if it is certainly too long."""
    if len(text) > model.max_text_chars:
        most = f"at most {model.max_text_chars}, since the context length is {model.max_context} tokens"
        raise bad_request(f"{param}: the text has {len(text)} characters; allowed: {most}", param, _TOO_LONG)
    return model.tokenizer.encode(text, add_special_tokens)


def pack_token_ids(model: ServedModel, token_ids: Collection[int], param: str) -> TokenIds:
    vocab_size = model.tokenizer.vocab_size
    with suppress(ValueError):
        packed = TokenIds.of(token_ids)
        if len(token_ids) < _FEW:
            is_sound = not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)
        else:  # negative ids become the largest unsigned numbers
            is_sound = bool(np.frombuffer(packed.packed, "<u4").max() < vocab_size)
        if is_sound:
            return packed
    wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    raise bad_request(f"{param}: there is no token {wrong}; allowed: 0 to {vocab_size - 1}", param)


def make_requests(
    model: ServedModel,
    body: GenerationBody,
    prompts: Sequence[Collection[int]],
    max_tokens: int,
    grammar: str,
    markers: Collection[str] = (),
) -> list[GenerateRequest]:
    """Create the request of each prompt. The text shows ``markers`` even if they are special tokens."""
    eos_ids = frozenset[int]() if body.ignore_eos else model.tokenizer.eos_ids
    ending_ids = eos_ids.union(body.stop_token_ids or ())
    if body.min_tokens and body.allowed_token_ids and ending_ids.issuperset(body.allowed_token_ids):
        raise bad_request("min_tokens: every one of allowed_token_ids would end the answer", "min_tokens")
    sampling = make_sampling(model, body, ending_ids, grammar)
    _check_rules(sampling, len(prompts) * body.num_choices)
    rules = _text_rules(model, body, ending_ids, markers)
    requests = []
    for number, prompt in enumerate(prompts):
        prompt_ids, most = _check_lengths(model, body, prompt, max_tokens)
        shares_seed = not number or body.seed is not None
        requests.append(
            GenerateRequest(
                prompt_ids=prompt_ids,
                sampling=sampling if shares_seed else replace(sampling, seed=secrets.randbits(63)),
                stopping=Stopping(max_tokens=most, stop_token_ids=ending_ids),
                text_rules=rules,
                cache_salt=body.salt,
                traced=bool(body.trace),
            )
        )
    return requests


def _check_lengths(
    model: ServedModel, body: GenerationBody, given_ids: Collection[int], max_tokens: int
) -> tuple[TokenIds, int]:
    """Return a prompt's tokens and the maximum length of its answer. Raises ApiError."""
    param, wanted = body.prompt_field, body.wanted_tokens
    if not given_ids:
        raise bad_request(f"{param}: is empty; at least one token is needed", param)
    prompt_ids = pack_token_ids(model, given_ids, param)
    prompt_len = len(prompt_ids)
    left = max_tokens - prompt_len
    if left < 1 or (wanted is not None and wanted > left):
        raise _too_long(model, prompt_len, wanted, param, max_tokens)
    default = body.default_tokens or model.sampling_defaults.max_new_tokens or left
    most = min(default, left) if wanted is None else max(wanted, 1)
    if body.min_tokens is not None and body.min_tokens > most:
        raise bad_request(f"min_tokens: must be at most max_tokens ({most}), got {body.min_tokens}", "min_tokens")
    check_prompt_logprobs(prompt_len, body.num_prompt_logprobs, body.num_choices)
    return prompt_ids, most


def _check_rules(sampling: Sampling, num_choices: int) -> None:
    """Reject sampling rules that take too much memory, because every choice's message to the replicas has them."""
    if not (sampling.grammar or sampling.logit_bias or sampling.allowed_ids or sampling.bad_words):
        return
    sizes = {
        "grammar": len(sampling.grammar),
        "logit_bias": _BIAS_BYTES * len(sampling.logit_bias),
        "allowed_token_ids": _ID_BYTES * len(sampling.allowed_ids),
        "bad_words": _ID_BYTES * sum(map(len, sampling.bad_words)),
    }
    if num_choices * sum(sizes.values()) > MAX_RULE_BYTES:
        param = max(sizes, key=lambda name: sizes[name])
        got = f"{num_choices} choices with {sum(sizes.values())} bytes each"
        most = f"at most {MAX_RULE_BYTES} bytes of grammar, logit_bias, allowed_token_ids and bad_words together"
        raise bad_request(f"{param}: got {got}; allowed: {most}", param)


def make_sampling(model: ServedModel, body: GenerationBody, ending_ids: frozenset[int], grammar: str = "") -> Sampling:
    tokenizer, defaults = model.tokenizer, model.sampling_defaults
    top_p = given_or(body.top_p, defaults.top_p)
    needs_endings = body.min_tokens or grammar
    known_ids = (token_id for token_id in ending_ids if token_id < tokenizer.vocab_size) if needs_endings else ()
    return Sampling(
        temperature=given_or(body.temperature, defaults.temperature) if top_p else 0.0,
        top_p=top_p or 1.0,
        top_k=max(given_or(body.top_k, defaults.top_k), 0),
        min_p=given_or(body.min_p, defaults.min_p),
        seed=secrets.randbits(63) if body.seed is None else body.seed & SEED_MASK,
        repetition_penalty=given_or(body.repetition_penalty, defaults.repetition_penalty),
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=body.logit_bias or {},
        allowed_ids=frozenset(body.allowed_token_ids or ()),
        bad_words=_bad_words(tokenizer, body.bad_words) if body.bad_words else [],
        min_tokens=body.min_tokens or 0,
        ending_ids=frozenset(known_ids),
        grammar=grammar,
        num_logprobs=body.num_logprobs,
        num_prompt_logprobs=body.num_prompt_logprobs,
    )


def _text_rules(
    model: ServedModel, body: GenerationBody, stop_token_ids: frozenset[int], markers: Collection[str]
) -> TextRules:
    is_marked = not model.tokenizer.special_texts.isdisjoint(markers)
    return TextRules(
        stops=[body.stop] if isinstance(body.stop, str) else body.stop or (),
        stop_token_ids=stop_token_ids,
        asked_stop_ids=frozenset(body.stop_token_ids or ()),
        include_stop=bool(body.include_stop_str_in_output or body.no_stop_trim),
        skip_special_tokens=body.skip_special_tokens is not False and not is_marked,
        min_tokens=body.min_tokens or 0,
        prompt_only=body.max_tokens == 0,
        continues_prompt=body.continues_prompt,
    )


def given_or(given: _T | None, default: _T) -> _T:
    """Return a field's value, or the default if it is None."""
    return default if given is None else given


def check_prompt_logprobs(prompt_len: int, num_prompt_logprobs: int | None, num_choices: int = 1) -> None:
    """Reject prompt log-probabilities that do not fit in one message, or in a response with all choices."""
    if num_prompt_logprobs is None:
        return
    allowed = MAX_FRAME_BYTES // 2 // (_LOGPROBS_BYTES + num_prompt_logprobs * _TOP_LOGPROB_BYTES) // num_choices
    if prompt_len > allowed:
        got = f"got {num_prompt_logprobs} with a prompt of {prompt_len} tokens"
        most = f"a prompt of at most {allowed} tokens with this setting"
        raise bad_request(f"prompt_logprobs: {got}; allowed: {most}", "prompt_logprobs")


def _prompt_ids(model: ServedModel, body: CompletionRequest) -> Sequence[Collection[int]]:
    adds, prompts = body.add_special_tokens is not False, body.prompts
    if len(prompts) > MAX_PROMPTS:
        raise bad_request(f"prompt: at most {MAX_PROMPTS} prompts in one request, got {len(prompts)}", "prompt")
    if len(prompts) * body.num_choices > MAX_PROMPTS:
        got = f"{len(prompts)} prompts with n = {body.num_choices}"
        raise bad_request(f"n: at most {MAX_PROMPTS} choices in one request, got {got}", "n")
    return [
        token_ids_of(model, prompt, "prompt", add_special_tokens=adds) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]


def _bad_words(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    """Return each word's tokens at the start of a text and after a space, if the model can produce them."""
    spellings = (spelling for word in words for spelling in (word.lstrip() or word, f" {word.lstrip()}"))
    encoded = (tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings)
    return [list(word) for word in dict.fromkeys(encoded) if word and max(word) < tokenizer.vocab_size]


def _too_long(model: ServedModel, prompt_len: int, wanted: int | None, param: str, max_tokens: int) -> ApiError:
    """Return an error in OpenAI's words, by which many clients notice that they must shorten the conversation."""
    most = f"This model's maximum context length is {max_tokens} tokens, prompt and answer together"
    if max_tokens != model.max_context:
        most += ", since this deployment's KV pool holds no more"
    if prompt_len >= max_tokens:
        return bad_request(f"{param}: {most}. However, the prompt has {prompt_len} tokens", param, _TOO_LONG)
    message = f"max_tokens: {most}. However, the prompt has {prompt_len} tokens and {wanted} more were requested"
    return bad_request(message, "max_tokens", _TOO_LONG)
