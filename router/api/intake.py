"""From a valid request to what replicas are asked: tokens, limits, sampling. Refuses what does not fit the model."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any, TypeVar

import numpy as np

from cluster.channel import MAX_FRAME_BYTES
from cluster.spec.errors import UserError
from cluster.spec.sampling import Stopping
from cluster.spec.token_ids import TokenIds
from router.api.constrain import checked_grammar, wanted_answer
from router.api.errors import ApiError, bad_request
from router.api.requests import ChatMessage, CompletionRequest, GenerationRequest, TokensRequest
from router.api.sampling import make_sampling, stop_token_ids
from router.api.unsupported import refuse_unsupported
from router.flight import Ask
from router.prefix_keys import PromptKeys
from router.service import Service

MAX_PROMPTS = 1024
"""Most prompts in one request."""

_TOO_LONG = "context_length_exceeded"
_DEFAULT_COMPLETION_TOKENS = 16
_TOLD_BYTES, _TOLD_TOP_BYTES = 64, 14
"""At most, of one token of a prompt, and of each of the likeliest in its place."""
_INLINE_CHARS = 4096
"""Texts up to this length are tokenized on the event loop; a thread costs more than that takes."""
_FEW = 64
"""Fewer numbers are compared sooner than numpy has begun."""

Made = TypeVar("Made")


def check_model(service: Service, model: str | None) -> None:
    """Refuse a model that is not served here.

    Raises:
        ApiError: 404 that names both.
    """
    if model is not None and model != service.model:
        message = f"the model {model!r} does not exist; this endpoint serves {service.model!r}"
        raise ApiError(HTTPStatus.NOT_FOUND, message, "model", "model_not_found")


async def completion_asks(service: Service, body: CompletionRequest) -> list[Ask]:
    """One ask for every prompt.

    Raises:
        ApiError: 404 or 400.
    """
    check(service, body)
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise bad_request("max_tokens: 0 is only allowed together with echo or prompt_logprobs", "max_tokens")
    prompts = await _prompt_ids(service, body)
    if body.timeline and len(prompts) > 1:
        raise bad_request(f"timeline: only one prompt can be timed, got {len(prompts)}", "timeline")
    grammar = await checked_grammar(service, wanted_answer(body))
    default = _DEFAULT_COMPLETION_TOKENS
    return [make_ask(service, body, prompt, body.max_tokens, default, "prompt", grammar) for prompt in prompts]


async def tokens_ask(service: Service, body: TokensRequest) -> Ask:
    """The ask of a prompt in tokens.

    Raises:
        ApiError: 404 or 400.
    """
    check(service, body)
    grammar = await checked_grammar(service, wanted_answer(body))
    return make_ask(service, body, body.prompt_ids, body.max_tokens, _DEFAULT_COMPLETION_TOKENS, "prompt_ids", grammar)


async def chat_prompt(
    service: Service,
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool,
    variables: dict[str, Any] | None = None,
    add_special_tokens: bool = False,
) -> tuple[list[int], str]:
    """Token ids and text of a conversation, by the model's chat template, which mostly writes special tokens itself.

    The developer is OpenAI's newer word for the system, and so shown to templates that know no developer.

    Raises:
        ApiError: 400 when there is no template, or it refuses the messages.
    """
    given = [message.for_template() for message in messages]
    if "developer" not in (service.tokenizer.chat_template or ""):
        # Most templates pass over roles that they do not know, and what the developer wants would be lost.
        given = [message | {"role": "system"} if message["role"] == "developer" else message for message in given]

    def render_and_encode() -> tuple[list[int], str]:
        text = service.tokenizer.apply_chat_template(given, add_generation_prompt, variables)
        return service.tokenizer.encode(text, add_special_tokens), text

    try:
        return await _off_loop(sum(len(message["content"]) for message in given), render_and_encode)
    except UserError as error:
        raise bad_request(str(error), "messages") from error


async def encode(service: Service, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text, without holding up other requests."""
    return await _off_loop(len(text), lambda: service.tokenizer.encode(text, add_special_tokens))


def pack_token_ids(service: Service, token_ids: Collection[int], param: str) -> TokenIds:
    """Ids as they travel. Refuses those that the model has no token for.

    Raises:
        ApiError: 400 that names one of them.
    """
    vocab_size = service.tokenizer.vocab_size
    with suppress(ValueError):
        packed = TokenIds.of(token_ids)
        if len(token_ids) < _FEW:
            is_sound = not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)
        else:  # in which negative ones count as the highest
            is_sound = bool(np.frombuffer(packed.packed, "<u4").max() < vocab_size)
        if is_sound:
            return packed
    wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    raise bad_request(f"{param}: there is no token {wrong}; allowed: 0 to {vocab_size - 1}", param)


async def _off_loop(num_chars: int, make: Callable[[], Made]) -> Made:
    return make() if num_chars <= _INLINE_CHARS else await asyncio.to_thread(make)


def check(service: Service, body: GenerationRequest) -> None:
    """Refuse what no request may ask here.

    Raises:
        ApiError: 404 or 400.
    """
    check_model(service, body.model)
    refuse_unsupported(body.others)
    max_choices = service.config.router.max_choices
    if body.num_choices > max_choices:
        raise bad_request(f"n: at most {max_choices} (router.max_choices), got {body.num_choices}", "n")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: only allowed when stream is true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs: not told in a stream; leave one of both out", "prompt_logprobs")
    for param, token_ids in (("logit_bias", body.logit_bias), ("allowed_token_ids", body.allowed_token_ids)):
        if token_ids is not None:
            pack_token_ids(service, token_ids, param)


async def _prompt_ids(service: Service, body: CompletionRequest) -> Sequence[Collection[int]]:
    adds = body.add_special_tokens is not False
    match body.prompt:
        case str():
            return [await encode(service, body.prompt, adds)]
        case TokenIds() | [int(), *_]:
            prompts: list[list[int] | str] = [body.prompt]  # type: ignore[list-item]
        case _:
            prompts = body.prompt  # type: ignore[assignment]
    if len(prompts) > MAX_PROMPTS:
        raise bad_request(f"prompt: at most {MAX_PROMPTS} prompts in one request, got {len(prompts)}", "prompt")
    if len(prompts) * body.num_choices > MAX_PROMPTS:
        got = f"{len(prompts)} prompts with n = {body.num_choices}"
        raise bad_request(f"n: at most {MAX_PROMPTS} choices in one request, got {got}", "n")
    return [await encode(service, prompt, adds) if isinstance(prompt, str) else prompt for prompt in prompts]


def make_ask(
    service: Service,
    body: GenerationRequest,
    given_ids: Collection[int],
    wanted: int | None,
    default: int,
    param: str,
    grammar: str,
) -> Ask:
    """What replicas are asked. wanted, default: most tokens of the answer; param: the field of the prompt.

    Raises:
        ApiError: 400 for what the model has no room for, or no tokens.
    """
    if not given_ids:
        raise bad_request(f"{param}: is empty; at least one token is needed", param)
    prompt_ids = pack_token_ids(service, given_ids, param)
    prompt_len = len(prompt_ids)
    longest = service.config.router.max_prompt_tokens
    if longest is not None and prompt_len > longest:
        allowed = f"{longest} (router.max_prompt_tokens)"
        raise bad_request(f"{param}: the prompt has {prompt_len} tokens; allowed: {allowed}", param, _TOO_LONG)
    room = service.max_tokens - prompt_len
    if room < 1 or (wanted is not None and wanted > room):
        raise _too_long(service, prompt_len, wanted, param)
    max_tokens = min(default, room) if wanted is None else max(wanted, 1)
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise bad_request(f"min_tokens: must be at most max_tokens, {max_tokens}, got {body.min_tokens}", "min_tokens")
    stopping = Stopping(max_tokens=max_tokens, stop_token_ids=stop_token_ids(service, body))
    if body.min_tokens and body.allowed_token_ids and stopping.stop_token_ids.issuperset(body.allowed_token_ids):
        raise bad_request("min_tokens: every one of allowed_token_ids would end the answer", "min_tokens")
    _check_told(prompt_len, body.num_prompt_logprobs)
    sampling = make_sampling(service, body, stopping.stop_token_ids, grammar)
    salt, is_looked_for = body.salt, sampling.num_prompt_logprobs is None
    return Ask(
        prompt_ids=prompt_ids,
        sampling=sampling,
        stopping=stopping,
        cache_salt=salt,
        priority=body.priority or 0,
        timed=bool(body.timeline),
        page_keys=PromptKeys(prompt_ids, service.config.kv.page_size, salt) if is_looked_for else None,
    )


def _check_told(prompt_len: int, num_prompt_logprobs: int | None) -> None:
    """What is told of a prompt is one message."""
    if num_prompt_logprobs is None:
        return
    allowed = MAX_FRAME_BYTES // 2 // (_TOLD_BYTES + num_prompt_logprobs * _TOLD_TOP_BYTES)
    if prompt_len > allowed:
        message = (
            f"prompt_logprobs: with {num_prompt_logprobs} of each token at most {allowed} tokens, got {prompt_len}"
        )
        raise bad_request(message, "prompt_logprobs")


def _too_long(service: Service, prompt_len: int, wanted: int | None, param: str) -> ApiError:
    """Begins with OpenAI's words, by which many clients know that they have to shorten a conversation."""
    limit = service.max_tokens
    most = f"This model's maximum context length is {limit} tokens, prompt and answer together"
    if limit != service.max_context:
        most += ", since this deployment's KV pool holds no more"
    if prompt_len >= limit:
        return bad_request(f"{param}: {most}. However, the prompt has {prompt_len} tokens", param, _TOO_LONG)
    message = f"max_tokens: {most}. However, the prompt has {prompt_len} tokens and {wanted} more were asked for"
    return bad_request(message, "max_tokens", _TOO_LONG)
