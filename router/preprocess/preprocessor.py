"""Preprocessing of a body: everything that takes work in proportion to what a client sends. Pure, without I/O."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field
from pydantic_core import to_json

from router.errors import ApiError, bad_request
from router.page_index import LONG_TOKENS, PromptKeys
from router.preprocess.body import HARMLESS, Body, Extracted, extract_ids, parse, refuse_unsupported
from router.preprocess.chat import chat_prompt, chat_request
from router.preprocess.intake import check_model, completion_requests, given_or, pack_token_ids, token_ids_of
from router.preprocess.job import (
    ChatOptions,
    CompletionOptions,
    Job,
    JsonText,
    Preprocessed,
    ResponseOptions,
    Route,
)
from router.preprocess.model import ServedModel
from router.preprocess.requests import ChatMessage, ChatRequest, CompletionRequest, GenerationBody, TemplateBody
from router.preprocess.response_request import (
    ENCRYPTED_REASONING,
    Reasoning,
    ResponseRequest,
    chat_of,
    in_own_words,
)
from router.request import GenerateRequest

_SESSION_FIELDS = ("prompt_cache_key", "session_id", "user")
MAX_SESSION_CHARS = 256
FEW = 32
"""Number of prompts and bad words up to which they are tokenized where other clients wait, in a millisecond."""
_TOKENIZE_HARMLESS = {
    name: HARMLESS[name] for name in ("chat_template", "continue_final_message", "documents", "truncate_prompt_tokens")
}
"""Unsupported fields that would change the prompt, with the values that have no effect."""


class NotInlineError(Exception):
    """The body may take long, and this process serves other clients."""


class TokenizeRequest(TemplateBody):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]


def preprocess(model: ServedModel, job: Job, extracted: Extracted | None = None) -> Preprocessed | JsonText:
    """Validate, render, tokenize and check a body. ``extracted`` is the body of a completion without its ids.

    Raises:
        ApiError: the body is wrong.
        NotInlineError: ``model.grammars`` is None, and the body has a grammar, tools, or many prompts or words.
    """
    match job.route:
        case Route.COMPLETIONS:
            extracted = extracted or extract_ids(job.body)
            return _completion(model, job, parse(job.body, CompletionRequest, extracted))
        case Route.CHAT:
            return _chat(model, job, parse(job.body, ChatRequest))
        case Route.RESPONSES:
            return _response(model, job, parse(job.body, ResponseRequest))
        case Route.TOKENIZE:
            return _tokenize(model, job, parse(job.body, TokenizeRequest))
        case Route.DETOKENIZE:
            return _detokenize(model, parse(job.body, DetokenizeRequest))


def _completion(model: ServedModel, job: Job, body: CompletionRequest) -> Preprocessed:
    _check_place(model, body)
    requests = completion_requests(model, body, job.max_tokens)
    echoes, skip = [], body.skip_special_tokens is not False and not isinstance(body.prompts[0], str)
    if body.echo:
        echoes = [
            prompt if isinstance(prompt, str) else model.tokenizer.decode([*request.prompt_ids], skip)
            for request, prompt in zip(requests, body.prompts, strict=True)
        ]
    options = CompletionOptions(
        **_common(body), echoes=echoes, with_logprobs=body.num_logprobs is not None, skip_special_tokens=skip
    )
    return _outcome(model, job, body, requests, options, body.others)


def _chat(model: ServedModel, job: Job, body: ChatRequest) -> Preprocessed:
    _check_place(model, body)
    request, form = chat_request(model, body, job.max_tokens)
    options = ChatOptions(**_common(body), form=form, include_reasoning=body.include_reasoning is not False)
    return _outcome(model, job, body, [request], options, body.others)


def _response(model: ServedModel, job: Job, body: ResponseRequest) -> Preprocessed:
    chat = chat_of(body)
    _check_place(model, chat)
    try:
        request, form = chat_request(model, chat, job.max_tokens)
    except ApiError as error:
        raise in_own_words(error) from None
    options = ResponseOptions(
        **_common(chat),
        form=form,
        encrypts_reasoning=ENCRYPTED_REASONING in (body.include or ()),
        fields=to_json(_repeated(model, body)),
    )
    return _outcome(model, job, chat, [request], options, {"user": body.user} | body.others)


def _tokenize(model: ServedModel, job: Job, body: TokenizeRequest) -> JsonText:
    check_model(model, body.model)
    refuse_unsupported(body.others, _TOKENIZE_HARMLESS)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt: exactly one of prompt and messages is required", "prompt")
    if body.messages is not None:
        token_ids = chat_prompt(model, body.messages, body)[0]
    else:
        adds = body.add_special_tokens is not False
        token_ids = token_ids_of(model, body.prompt or "", "prompt", add_special_tokens=adds)
    answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": job.max_tokens, "tokens": token_ids}
    if body.return_token_strs:
        answer["token_strs"] = [model.tokenizer.token_of(token_id) for token_id in token_ids]
    return JsonText(text=msgspec.json.encode(answer))


def _detokenize(model: ServedModel, body: DetokenizeRequest) -> JsonText:
    check_model(model, body.model)
    pack_token_ids(model, body.tokens, "tokens")
    return JsonText(text=msgspec.json.encode({"prompt": model.tokenizer.decode(body.tokens, False)}))


def _check_place(model: ServedModel, body: GenerationBody) -> None:
    if model.grammars is not None:
        return
    num_prompts = len(body.prompts) if isinstance(body, CompletionRequest) else 1
    has_tools = isinstance(body, ChatRequest) and body.tools
    if body.is_constrained or has_tools or num_prompts + len(body.bad_words or ()) > FEW:
        raise NotInlineError


def _common(body: GenerationBody) -> dict[str, Any]:
    return {
        "include_usage": body.include_usage,
        "continuous_usage": body.continuous_usage,
        "return_token_ids": bool(body.return_token_ids),
        "num_prompt_logprobs": body.prompt_logprobs,
    }


def _outcome(
    model: ServedModel,
    job: Job,
    body: GenerationBody,
    requests: Sequence[GenerateRequest],
    options: CompletionOptions | ChatOptions | ResponseOptions,
    fields: Mapping[str, Any],
) -> Preprocessed:
    """Return the outcome; ``fields`` are the undeclared fields of the client's body, which can name the session."""
    keys = []
    for request in requests:
        request.cache_salt = job.salt + body.salt
        if job.with_keys and len(request.prompt_ids) > LONG_TOKENS and request.may_use_cache:
            keys.append(PromptKeys(request.prompt_ids, model.page_size, request.cache_salt).all())
        else:
            keys.append([])
    return Preprocessed(
        requests=[*requests],
        options=options,
        num_choices=body.num_choices,
        stream=bool(body.stream),
        priority=body.priority,
        dp_rank=body.routed_dp_rank,
        session_id=_session_of(fields) if fields else "",
        page_keys=keys if any(keys) else [],
    )


def _session_of(fields: Mapping[str, Any]) -> str:
    named = (fields.get(field) for field in _SESSION_FIELDS)
    return next((text[:MAX_SESSION_CHARS] for text in named if isinstance(text, str) and text), "")


def _repeated(model: ServedModel, body: ResponseRequest) -> dict[str, Any]:
    """Return the fields of a response that repeat the request."""
    written = body.text.format if body.text is not None else None
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": (body.reasoning or Reasoning()).model_dump(),
        "temperature": given_or(body.temperature, model.sampling_defaults.temperature),
        "text": {
            "format": {"type": "text"} if written is None else written.model_dump(by_alias=True, exclude_unset=True)
        },
        "tool_choice": body.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_p": given_or(body.top_p, model.sampling_defaults.top_p),
        "user": body.user,
    }
