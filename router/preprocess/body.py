"""Validation of request bodies, and errors for wrong and unsupported fields.

Long lists of token ids are extracted before pydantic validates the body, because pydantic would create a Python number
for each id. Anything that is not clearly a list of integers is left to pydantic, which reports the error.
"""

import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, ValidatorFunctionWrapHandler
from pydantic_core import ErrorDetails

from cluster.spec.wire import TokenIds
from router.errors import ApiError, bad_request
from router.preprocess.id_reader import read_ids

EXPECTED = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of such lists; no list may be empty",
    "stop": "a string, or a list of at most 16 strings, each of 1 to 1024 characters",
    "input": "a string, or a list of messages, function calls, their outputs, and reasoning",
    "content": "a string, or a list of parts of type text or refusal; images, audio and files are not supported",
    "tool_choice": '"none", "auto", "required", an object of type "function" that names one of the tools, or one of '
    'type "allowed_tools" with a mode, "auto" or "required", and at least one of the tools',
    **dict.fromkeys(("guided_json", "json_schema", "json"), "a JSON schema, as an object or as text"),
    "format": 'an object of type "text", "json_object" or "json_schema"; the last with "name" and "schema"',
    "response_format": 'an object of type "text", "json_object" or "json_schema"; the last with "json_schema": '
    '{"name": ..., "schema": {...}}',
}
"""Descriptions, for error messages, of fields that accept several types."""
_LONG_BYTES = 2048
"""Body size in bytes below which lists of token ids are left to pydantic, which reads short ones just as fast."""
_PLACEHOLDER = secrets.token_hex(16)
"""Text that replaces the ids in the body; no client can guess it."""
_OPENING = re.compile(rb"\s*:\s*\[")
_WORDS = {
    "extra_forbidden": "there is no such field",
    "too_short": "must have {min_length} or more items",
    "too_long": "must have at most {max_length} items",
}
"""Messages that replace pydantic's, by error type."""

_NEVER = (
    {"audio", "bootstrap_host", "bootstrap_pair_key", "bootstrap_port", "bootstrap_room"}
    | {"chat_template", "custom_logit_processor", "data_parallel_rank", "guided_whitespace_pattern"}
    | {"input_ids", "lora_path", "prompt_embeds", "reasoning", "repetition_detection", "session_params"}
    | {"task", "thinking_token_budget", "truncate_prompt_tokens", "web_search_options"}
    | {"logprob_start_len", "max_new_tokens", "max_thinking_tokens", "min_new_tokens", "return_logprob"}
    | {"sampling_params", "sampling_seed", "token_ids_logprob", "top_logprobs_num"}
)
_OTHER_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
"""Names of fields in other servers, mapped to the names that this one supports."""
_UNLESS_FALSE = (
    {"continue_final_message", "early_stopping", "echo", "return_cached_tokens_details"}
    | {"return_hidden_states", "return_meta_info", "return_prompt_token_ids", "return_routed_experts"}
    | {"return_tokens_as_token_ids", "use_beam_search"}
)
_UNLESS_EMPTY = {"documents", "functions", "logits_processors", "logprob_token_ids", "stop_regex", "tools"}
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NEVER, ()),
    **dict.fromkeys(_UNLESS_FALSE, (False,)),
    **dict.fromkeys(_UNLESS_EMPTY, ([],)),
    "best_of": (1,),
    "length_penalty": (1,),
    "custom_params": ({},),
    "vllm_xargs": ({},),
    "function_call": ("none", "auto"),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "routed_experts_start_len": (0,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "verbosity": ("medium",),
}
"""Unsupported fields of OpenAI's, vLLM's and SGLang's APIs, with the values besides null that have no effect."""

_SWITCHED_OFF_BY = {"tools": "tool_choice", "functions": "function_call"}
"""Fields that have no effect if the field they are mapped to is "none"."""


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())
    ids_field: ClassVar[str | None] = None
    """Name of the field that may hold thousands of token ids; ``put_back`` validates it."""
    expected: ClassVar[Mapping[str, str]] = EXPECTED

    @property
    def others(self) -> dict[str, Any]:
        """Fields of the body that the model does not declare."""
        return self.model_extra or {}


Read = TypeVar("Read", bound=Body)


def parse(content: bytes, schema: type[Read], extracted: "Extracted | None" = None) -> Read:
    """Validate a body, of which ``extract_ids`` may have split off the token ids.

    Raises:
        ApiError: 400 naming the first wrong field.
    """
    if extracted is not None and (body := _read_extracted(extracted, schema)) is not None:
        return body
    try:
        return schema.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "missing" and len(first["loc"]) == 1:
            # Another server's name for the field may have been used.
            others = first["input"].keys() - schema.model_fields.keys()
            refuse_unsupported({name: value for name, value in first["input"].items() if name in others})
        raise problem_of(first, schema.expected) from None


def _read_extracted(extracted: "Extracted", schema: type[Read]) -> Read | None:
    """Read a body without a Python number per token id. Return None if the ids belong to an inner object."""
    assert schema.ids_field is not None
    with suppress(ValidationError):
        body = schema.model_validate_json(extracted.rest, context=extracted.ids)
        return body if getattr(body, schema.ids_field) is extracted.ids else None
    return None


class Extracted(NamedTuple):
    rest: bytes
    """The body with a placeholder for the ids."""
    ids: TokenIds


def extract_ids(body: bytes) -> Extracted | None:
    """Split a body into its prompt's ids and the rest. Return None unless the prompt is certainly a list of ids.

    In JSON, an unescaped quote after ``{`` or ``,`` can only begin a key or a string, so a match is a key. It may
    belong to an inner object, so ``parse`` checks that ``put_back`` has restored the ids.
    """
    name = b'"prompt"'
    at = body.find(name) if len(body) >= _LONG_BYTES else -1
    opening = _OPENING.match(body, at + len(name)) if at >= 0 else None
    if opening is None or not body[:at].rstrip(b" \t\r\n").endswith((b"{", b",")):
        return None
    start, end = opening.end() - 1, body.find(b"]", opening.end()) + 1
    ids = read_ids(body, start, end)
    return None if ids is None else Extracted(b'%b"%b"%b' % (body[:start], _PLACEHOLDER.encode(), body[end:]), ids)


def put_back(given: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """Validate the field; replace the placeholder with the ids that were extracted."""
    return info.context if given == _PLACEHOLDER and info.context is not None else handler(given)


def problem_of(error: ErrorDetails, expected: Mapping[str, str] = EXPECTED) -> ApiError:
    """Convert pydantic's error to one that names the field."""
    if error["type"] == "json_invalid":
        return bad_request(f"body: {error['msg']}")
    path, field = _path(error["loc"], expected)
    if not path:
        return bad_request(f"body: must be a JSON object, got {shortened(repr(error['input']))}")
    if error["type"] == "missing":
        return bad_request(f"{path}: field required", path)
    if field in expected:
        return bad_request(f"{path}: must be {expected[field]}", path)
    words = _WORDS.get(error["type"])
    said = error["msg"] if words is None else words.format(**error.get("ctx", {}))
    return bad_request(f"{path}: {said}, got {shortened(repr(error['input']))}", path)


def _path(loc: tuple[int | str, ...], expected: Mapping[str, str]) -> tuple[str, str]:
    """Return a field's dotted path, without union tags, and its last name."""
    path, field = "", ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step != "[key]":
            path += f".{step}" if path else step
            field = step
            if field in expected:
                break
    return path, field


def refuse_unsupported(fields: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]] = HARMLESS) -> None:
    """Reject fields in ``table`` that would change the answer. Null and the listed values are accepted."""
    for name, value in fields.items():
        harmless, switch = table.get(name), _SWITCHED_OFF_BY.get(name, "")
        if harmless is None or value is None or any(_same(value, allowed) for allowed in harmless):
            continue
        if fields.get(switch) == "none":
            continue
        allowed = " or ".join(["null", *map(_json, harmless)])
        allowed += f', or anything with "{switch}": "none"' if switch else ""
        allowed += f"; use {_OTHER_NAMES[name]}" if name in _OTHER_NAMES else ""
        raise bad_request(f"{name}: not supported, got {_json(value)}; allowed: {allowed}", name, "unsupported")


def _same(given: Any, allowed: Any) -> bool:
    """Compare two values without treating true as 1 or false as 0."""
    return bool(given == allowed) and isinstance(given, bool) == isinstance(allowed, bool)


def _json(value: Any) -> str:
    return shortened(msgspec.json.encode(value).decode())


def shortened(text: str) -> str:
    """Return a text for an error message, which never quotes more than 60 characters."""
    return text if len(text) <= 60 else f"{text[:57]}..."
