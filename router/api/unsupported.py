"""Fields of OpenAI's and vLLM's APIs that change an answer and are not supported: refused, never silently ignored."""

from collections.abc import Mapping
from typing import Any

import msgspec

from router.api.errors import bad_request

_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""By field, the values besides null that ask for nothing."""


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Check the undeclared fields of a request.

    Raises:
        ApiError: 400 that names the first one that would change the answer.
    """
    for name, value in fields.items():
        harmless = _HARMLESS.get(name)
        if harmless is None or value is None or any(_same(value, allowed) for allowed in harmless):
            continue
        allowed = " or ".join(["null", *(_json(value) for value in harmless)])
        raise bad_request(f"{name}: not supported, got {_json(value)}; allowed: {allowed}", name, "unsupported")


def _same(given: Any, allowed: Any) -> bool:
    """Equal, where true is not 1 and false is not 0."""
    return bool(given == allowed) and isinstance(given, bool) == isinstance(allowed, bool)


def _json(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
