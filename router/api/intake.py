"""Conversion of a valid body to requests: tokens, limits and sampling, checked against the model."""

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from cluster.channel import MAX_FRAME_BYTES
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.wire import TokenIds
from cluster.tokenizer import Tokenizer
from router.api.body import refuse_unsupported
from router.api.constrain import checked_grammar, wanted_answer
from router.api.requests import CompletionRequest, GenerationBody
from router.errors import ApiError, bad_request
from router.page_index import PromptKeys
from router.request import GenerateRequest
from router.service import Service
from router.text import TextRules

MAX_PROMPTS = 1024

_TOO_LONG = "context_length_exceeded"
_LOGPROBS_BYTES, _TOP_LOGPROB_BYTES = 64, 14
"""Maximum number of message bytes per prompt token, and for each of the most likely tokens at its position."""
_INLINE_CHARS = 4096
"""Maximum length of a text that is tokenized on the event loop. For short texts, a thread costs more."""
_FEW = 64
"""Number of ids below which numpy is slower than ``min`` and ``max``."""
_SEED_MASK = 2**63 - 1
_T = TypeVar("_T")


def check_model(service: Service, model: str | None) -> None:
    if model is not None and model != service.model.name:
        message = f"the model {model!r} does not exist; this endpoint serves {service.model.name!r}"
        raise ApiError(HTTPStatus.NOT_FOUND, message, "model", "model_not_found")


def max_tokens(service: Service) -> int:
    """Return the maximum length of prompt and answer together, limited by the model and the replicas' KV pools."""
    limit, pool_tokens = service.model.max_context, service.directory.pool_tokens
    return limit if pool_tokens is None else min(limit, pool_tokens)


def check(service: Service, body: GenerationBody) -> None:
    """Reject unsupported fields and combinations."""
    check_model(service, body.model)
    refuse_unsupported(body.others)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: only allowed with stream=true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs: not supported with stream=true", "prompt_logprobs")
    for param, token_ids in (("logit_bias", body.logit_bias), ("allowed_token_ids", body.allowed_token_ids)):
        if token_ids is not None:
            pack_token_ids(service, token_ids, param)


async def completion_requests(service: Service, body: CompletionRequest) -> list[GenerateRequest]:
    check(service, body)
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise bad_request("max_tokens: 0 is only allowed together with echo or prompt_logprobs", "max_tokens")
    prompts = await _prompt_ids(service, body)
    if body.trace and len(prompts) > 1:
        raise bad_request(f"trace: at most one prompt can be traced, got {len(prompts)}", "trace")
    constraint = wanted_answer(body) if body.is_constrained else None
    grammar = await checked_grammar(service, constraint) if constraint is not None else ""
    return [make_request(service, body, prompt, grammar) for prompt in prompts]


async def encode(service: Service, text: str, add_special_tokens: bool) -> list[int]:
    return await off_loop(len(text), lambda: service.tokenizer.encode(text, add_special_tokens))


async def off_loop(num_chars: int, make: Callable[[], _T]) -> _T:
    """Call a function that tokenizes ``num_chars`` characters, in a thread if the text is long."""
    return make() if num_chars <= _INLINE_CHARS else await asyncio.to_thread(make)


def pack_token_ids(service: Service, token_ids: Collection[int], param: str) -> TokenIds:
    vocab_size = service.tokenizer.vocab_size
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


def make_request(
    service: Service, body: GenerationBody, given_ids: Collection[int], grammar: str, markers: Collection[str] = ()
) -> GenerateRequest:
    """Create the request for one prompt. The text shows ``markers`` even if they are special tokens."""
    param, wanted = body.prompt_field, body.wanted_tokens
    if not given_ids:
        raise bad_request(f"{param}: is empty; at least one token is needed", param)
    prompt_ids = pack_token_ids(service, given_ids, param)
    prompt_len = len(prompt_ids)
    longest = service.config.router.max_prompt_tokens
    if longest is not None and prompt_len > longest:
        allowed = f"at most {longest} (router.max_prompt_tokens)"
        raise bad_request(f"{param}: the prompt has {prompt_len} tokens; allowed: {allowed}", param, _TOO_LONG)
    left = max_tokens(service) - prompt_len
    if left < 1 or (wanted is not None and wanted > left):
        raise _too_long(service, prompt_len, wanted, param)
    most = min(body.default_tokens or left, left) if wanted is None else max(wanted, 1)
    if body.min_tokens is not None and body.min_tokens > most:
        raise bad_request(f"min_tokens: must be at most max_tokens ({most}), got {body.min_tokens}", "min_tokens")
    eos_ids = frozenset[int]() if body.ignore_eos else service.tokenizer.eos_ids
    stopping = Stopping(max_tokens=most, stop_token_ids=eos_ids.union(body.stop_token_ids or ()))
    if body.min_tokens and body.allowed_token_ids and stopping.stop_token_ids.issuperset(body.allowed_token_ids):
        raise bad_request("min_tokens: every one of allowed_token_ids would end the answer", "min_tokens")
    check_prompt_logprobs(prompt_len, body.num_prompt_logprobs)
    sampling = make_sampling(service, body, stopping.stop_token_ids, grammar)
    page_size, may_use_cache = service.config.kv.page_size, sampling.num_prompt_logprobs is None
    return GenerateRequest(
        prompt_ids=prompt_ids,
        sampling=sampling,
        stopping=stopping,
        text_rules=_text_rules(service, body, stopping.stop_token_ids, markers),
        cache_salt=body.salt,
        traced=bool(body.trace),
        page_keys=PromptKeys(prompt_ids, page_size, body.salt) if may_use_cache else None,
    )


def make_sampling(service: Service, body: GenerationBody, ending_ids: frozenset[int], grammar: str = "") -> Sampling:
    tokenizer, defaults = service.tokenizer, service.model.sampling_defaults
    top_p = given_or(body.top_p, defaults.top_p)
    known_ids = frozenset(token_id for token_id in ending_ids if token_id < tokenizer.vocab_size)
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
        bad_words=_bad_words(tokenizer, body.bad_words) if body.bad_words else [],
        min_tokens=body.min_tokens or 0,
        ending_ids=known_ids if body.min_tokens or grammar else frozenset(),
        grammar=grammar,
        num_logprobs=body.num_logprobs,
        num_prompt_logprobs=body.num_prompt_logprobs,
    )


def _text_rules(
    service: Service, body: GenerationBody, stop_token_ids: frozenset[int], markers: Collection[str]
) -> TextRules:
    is_marked = not service.tokenizer.special_texts.isdisjoint(markers)
    return TextRules(
        stops=[body.stop] if isinstance(body.stop, str) else body.stop or (),
        stop_token_ids=stop_token_ids,
        asked_stop_ids=frozenset(body.stop_token_ids or ()),
        include_stop=bool(body.include_stop_str_in_output or body.no_stop_trim),
        skip_special_tokens=body.skip_special_tokens is not False and not is_marked,
        min_tokens=body.min_tokens or 0,
        prompt_only=body.max_tokens == 0,
    )


def choices_of(request: GenerateRequest, num_choices: int) -> list[GenerateRequest]:
    """Return a request for each choice of a prompt, with its own seed. Only the first has prompt log-probabilities."""
    seeds = [(request.sampling.seed + choice) & _SEED_MASK for choice in range(1, num_choices)]
    samplings = [replace(request.sampling, seed=seed, num_prompt_logprobs=None) for seed in seeds]
    others = [replace(request, sampling=sampling, shares_prompt=True, output_ids=[]) for sampling in samplings]
    return [request, *others]


def given_or(given: _T | None, default: _T) -> _T:
    """Return a field's value, or the default if it is None."""
    return default if given is None else given


def check_prompt_logprobs(prompt_len: int, num_prompt_logprobs: int | None) -> None:
    """Reject prompt log-probabilities that do not fit in one message."""
    if num_prompt_logprobs is None:
        return
    allowed = MAX_FRAME_BYTES // 2 // (_LOGPROBS_BYTES + num_prompt_logprobs * _TOP_LOGPROB_BYTES)
    if prompt_len > allowed:
        got = f"got {num_prompt_logprobs} with a prompt of {prompt_len} tokens"
        most = f"a prompt of at most {allowed} tokens with this setting"
        raise bad_request(f"prompt_logprobs: {got}; allowed: {most}", "prompt_logprobs")


async def _prompt_ids(service: Service, body: CompletionRequest) -> Sequence[Collection[int]]:
    adds, prompts = body.add_special_tokens is not False, body.prompts
    if len(prompts) > MAX_PROMPTS:
        raise bad_request(f"prompt: at most {MAX_PROMPTS} prompts in one request, got {len(prompts)}", "prompt")
    if len(prompts) * body.num_choices > MAX_PROMPTS:
        got = f"{len(prompts)} prompts with n = {body.num_choices}"
        raise bad_request(f"n: at most {MAX_PROMPTS} choices in one request, got {got}", "n")
    return [await encode(service, prompt, adds) if isinstance(prompt, str) else prompt for prompt in prompts]


def _bad_words(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    """Return each word's tokens at the start of a text and after a space, if the model can produce them."""
    spellings = (spelling for word in words for spelling in (word.lstrip() or word, f" {word.lstrip()}"))
    encoded = (tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings)
    return [list(word) for word in dict.fromkeys(encoded) if word and max(word) < tokenizer.vocab_size]


def _too_long(service: Service, prompt_len: int, wanted: int | None, param: str) -> ApiError:
    """Return an error in OpenAI's words, by which many clients notice that they must shorten the conversation."""
    limit = max_tokens(service)
    most = f"This model's maximum context length is {limit} tokens, prompt and answer together"
    if limit != service.model.max_context:
        most += ", since this deployment's KV pool holds no more"
    if prompt_len >= limit:
        return bad_request(f"{param}: {most}. However, the prompt has {prompt_len} tokens", param, _TOO_LONG)
    message = f"max_tokens: {most}. However, the prompt has {prompt_len} tokens and {wanted} more were requested"
    return bad_request(message, "max_tokens", _TOO_LONG)
