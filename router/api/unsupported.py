"""Fields of OpenAI's, vLLM's and SGLang's APIs that change an answer and are not supported: refused, never ignored."""

from collections.abc import Mapping
from typing import Any

import msgspec

from router.api.errors import bad_request

HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "bootstrap_host": (),
    "bootstrap_pair_key": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "data_parallel_rank": (),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "input_ids": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora_path": (),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "repetition_detection": (),
    "reasoning": (),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_start_len": (0,),
    "separate_reasoning": (True,),
    "session_params": (),
    "stop_regex": ([],),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "task": (),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
"""Neutral values besides null, by undeclared field."""

_SWITCHED_OFF_BY = {"tools": "tool_choice", "functions": "function_call"}
"""Any value of a field changes nothing if this other one is "none"."""


def refuse_unsupported(fields: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]] = HARMLESS) -> None:
    """Check the undeclared fields of a request.

    Args:
        table: by field, the values besides null that change nothing.
    """
    for name, value in fields.items():
        harmless, switch = table.get(name), _SWITCHED_OFF_BY.get(name, "")
        if harmless is None or value is None or any(_same(value, allowed) for allowed in harmless):
            continue
        if fields.get(switch) == "none":
            continue
        allowed = " or ".join(["null", *(_json(value) for value in harmless)])
        allowed += f', or anything with "{switch}": "none"' if switch else ""
        raise bad_request(f"{name}: not supported, got {_json(value)}; allowed: {allowed}", name, "unsupported")


def _same(given: Any, allowed: Any) -> bool:
    """Compare, where true is not 1 and false is not 0."""
    return bool(given == allowed) and isinstance(given, bool) == isinstance(allowed, bool)


def _json(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
