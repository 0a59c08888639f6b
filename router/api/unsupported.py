"""Fields of OpenAI's, vLLM's and SGLang's APIs that change an answer and are not supported: refused, never ignored."""

from collections.abc import Mapping
from typing import Any

import msgspec

from router.errors import bad_request

_NEVER = (
    {"audio", "bootstrap_host", "bootstrap_pair_key", "bootstrap_port", "bootstrap_room"}
    | {"chat_template", "custom_logit_processor", "data_parallel_rank", "guided_whitespace_pattern"}
    | {"input_ids", "lora_path", "prompt_embeds", "reasoning", "repetition_detection", "session_params"}
    | {"task", "thinking_token_budget", "truncate_prompt_tokens", "web_search_options"}
    | {"logprob_start_len", "max_new_tokens", "max_thinking_tokens", "min_new_tokens", "return_logprob"}
    | {"sampling_params", "sampling_seed", "token_ids_logprob", "top_logprobs_num"}
)
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
"""Neutral values besides null, by undeclared field."""

_SWITCHED_OFF_BY = {"tools": "tool_choice", "functions": "function_call"}
"""Any value of a field changes nothing if this other one is "none"."""


def refuse_unsupported(fields: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]] = HARMLESS) -> None:
    """Refuse undeclared fields that would change the answer: others than null and the values in ``table``."""
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
