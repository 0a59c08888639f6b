"""Fields of OpenAI's and vLLM's APIs that change an answer and are not supported: refused, never silently ignored."""

from collections.abc import Mapping
from typing import Any

import msgspec

from router.api.errors import bad_request

_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""By field, the values besides null that ask for nothing."""

_SWITCHED_OFF_BY = {"tools": "tool_choice", "functions": "function_call"}
"""Any value of these is harmless beside "none" for that."""


def refuse_unsupported(fields: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]] = _HARMLESS) -> None:
    """Check the undeclared fields of a request; ``table`` has, by field, the values besides null that ask for nothing.

    Raises:
        ApiError: 400 that names the first one that would change the answer.
    """
    for name, value in fields.items():
        harmless, switch = table.get(name), _SWITCHED_OFF_BY.get(name, "")
        if harmless is None or value is None or any(_same(value, allowed) for allowed in harmless):
            continue
        if fields.get(switch) == "none":
            continue
        allowed = " or ".join(["null", *(_json(value) for value in harmless)])
        allowed += f', or anything beside "{switch}": "none"' if switch else ""
        raise bad_request(f"{name}: not supported, got {_json(value)}; allowed: {allowed}", name, "unsupported")


def _same(given: Any, allowed: Any) -> bool:
    """Equal, where true is not 1 and false is not 0."""
    return bool(given == allowed) and isinstance(given, bool) == isinstance(allowed, bool)


def _json(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
