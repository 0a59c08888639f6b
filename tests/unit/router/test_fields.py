"""No field of a request is dropped in silence: each is passed on, refused by name, or known to change nothing."""

import json
from typing import Any

import pytest

from router.api.errors import ApiError
from router.api.requests import Body, ChatRequest, CompletionRequest, GenerationBody
from router.api.response_chat import chat_of
from router.api.response_request import ResponseRequest
from router.api.unsupported import refuse_unsupported

MESSAGES = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f"}}
OTHERWISE: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": True,
    "allowed_token_ids": [1],
    "audio": {"voice": "alloy"},
    "background": True,
    "bad_words": ["x"],
    "best_of": 2,
    "bootstrap_host": "x",
    "bootstrap_port": 1,
    "bootstrap_room": 1,
    "cache_salt": "x",
    "chat_template": "x",
    "chat_template_kwargs": {"x": 1},
    "continue_final_message": True,
    "conversation": "x",
    "custom_logit_processor": "x",
    "custom_params": {"x": 1},
    "data_parallel_rank": 1,
    "documents": [{"text": "x"}],
    "early_stopping": True,
    "ebnf": 'root ::= "x"',
    "echo": True,
    "extra_key": "x",
    "frequency_penalty": 1.0,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "guided_choice": ["x"],
    "guided_grammar": 'start: "x"',
    "guided_json": {"type": "integer"},
    "guided_regex": "x",
    "guided_whitespace_pattern": " ",
    "ignore_eos": True,
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "input": "y",
    "input_ids": [1],
    "instructions": "x",
    "json_schema": {"type": "integer"},
    "length_penalty": 2.0,
    "logit_bias": {"1": 2.0},
    "logits_processors": ["x"],
    "logprob_token_ids": [1],
    "logprobs": True,
    "lora_path": "x",
    "max_completion_tokens": 3,
    "max_output_tokens": 3,
    "max_tokens": 3,
    "max_tool_calls": 1,
    "messages": MESSAGES,
    "min_p": 0.5,
    "min_tokens": 1,
    "modalities": ["audio"],
    "model": "n",
    "n": 2,
    "no_stop_trim": True,
    "parallel_tool_calls": False,
    "presence_penalty": 1.0,
    "previous_response_id": "x",
    "priority": 1,
    "prompt": {"id": "x"},
    "prompt_embeds": "x",
    "prompt_logprobs": 1,
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "regex": "x",
    "repetition_detection": {"max_pattern_size": 1},
    "repetition_penalty": 2.0,
    "response_format": {"type": "json_object"},
    "return_cached_tokens_details": True,
    "return_hidden_states": "last",
    "return_meta_info": True,
    "return_prompt_token_ids": True,
    "return_routed_experts": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "routed_dp_rank": 1,
    "routed_experts_start_len": 1,
    "seed": 1,
    "separate_reasoning": False,
    "session_params": {"id": "x"},
    "skip_special_tokens": False,
    "stop": ["x"],
    "stop_regex": "x",
    "stop_token_ids": [1],
    "stream": True,
    "stream_reasoning": False,
    "stream_options": {"continuous_usage_stats": True},
    "structured_outputs": {"regex": "x"},
    "suffix": "x",
    "task": "title",
    "temperature": 0.5,
    "text": {"format": {"type": "json_object"}},
    "thinking_token_budget": 1,
    "trace": True,
    "tool_choice": "required",
    "tools": [TOOL],
    "top_k": 3,
    "top_logprobs": 3,
    "top_p": 0.5,
    "truncate_prompt_tokens": 3,
    "truncation": "auto",
    "use_beam_search": True,
    "verbosity": "low",
    "vllm_xargs": {"x": 1},
    "web_search_options": {},
}
"""A value of each field that asks for another answer than none does."""

IN_A_RESPONSE = {"tools": [{"type": "function", "name": "f"}]}
"""Those that are written otherwise there."""

HARMLESS = {
    "custom_labels": "names a user's requests in metrics, which have no such labels here",
    "disagg_prefill_dp_rank": "where SGLang's router knows a prompt's pages to be; ours finds them itself",
    "images_config": "for images, which are refused",
    "include": "its log-probabilities are asked for by top_logprobs too; nothing else of it is ever there",
    "metadata": "is given back",
    "max_dynamic_patch": "for images, which are refused",
    "min_dynamic_patch": "for images, which are refused",
    "mm_processor_kwargs": "for images, which are refused",
    "ngram_corpus_id": "makes answers faster, not other ones",
    "prediction": "makes answers faster, not other ones",
    "prompt_cache_key": "a session's name",
    "request_id": "the header X-Request-Id is for that",
    "rid": "the header X-Request-Id is for that",
    "safety_identifier": "names a user",
    "service_tier": "there is one",
    "session_id": "a session's name",
    "store": "nothing is stored, and an answer says so",
    "use_audio_in_video": "for videos, which are refused",
    "user": "a session's name",
}
"""Why an answer is the same with any value."""

OF_SGLANG = (
    "bootstrap_host bootstrap_port bootstrap_room custom_labels custom_logit_processor custom_params "
    "disagg_prefill_dp_rank images_config lora_path ngram_corpus_id return_cached_tokens_details return_hidden_states "
    "data_parallel_rank return_routed_experts rid routed_experts_start_len session_id session_params stop_regex "
)
"""Fields that all its routes have."""

OF_OTHERS: dict[type[GenerationBody], str] = {
    CompletionRequest: f"{OF_SGLANG} best_of early_stopping length_penalty logits_processors logprob_token_ids "
    "prompt_embeds repetition_detection request_id return_tokens_as_token_ids suffix thinking_token_budget "
    "truncate_prompt_tokens use_beam_search user vllm_xargs guided_whitespace_pattern tools",
    ChatRequest: f"{OF_SGLANG} input_ids max_dynamic_patch min_dynamic_patch reasoning return_meta_info "
    "return_prompt_token_ids separate_reasoning stream_reasoning task use_audio_in_video "
    "audio best_of chat_template continue_final_message documents early_stopping echo functions "
    "function_call guided_whitespace_pattern length_penalty logits_processors logprob_token_ids metadata "
    "mm_processor_kwargs modalities prediction prompt_cache_key repetition_detection request_id "
    "return_tokens_as_token_ids safety_identifier service_tier store thinking_token_budget truncate_prompt_tokens "
    "use_beam_search user verbosity vllm_xargs web_search_options",
}
"""Fields of OpenAI's, vLLM's and SGLang's APIs that these do not declare."""


def refused(fields: dict[str, Any]) -> str | None:
    """The field that a response is refused for."""
    try:
        chat_of(ResponseRequest.model_validate({"model": "m", "input": "x"} | fields))
    except ApiError as error:
        return error.param
    return None


def chat_with(fields: dict[str, Any]) -> ChatRequest:
    return chat_of(ResponseRequest.model_validate({"model": "m", "input": "x"} | fields))


@pytest.mark.parametrize("name", sorted(ChatRequest.model_fields.keys() - ResponseRequest.model_fields.keys()))
def test_a_field_of_chat_means_the_same_in_a_response_or_is_refused(name: str) -> None:
    fields = {name: OTHERWISE[name]}
    assert refused({name: None}) is None
    if refused(fields) is None:
        same = ChatRequest.model_validate_json(json.dumps({"model": "m", "messages": MESSAGES} | fields))
        assert getattr(chat_with(fields), name) == getattr(same, name)
        assert getattr(same, name) != getattr(chat_with({}), name)
    else:
        assert refused(fields) == name


@pytest.mark.parametrize("name", sorted(ResponseRequest.model_fields.keys() - HARMLESS.keys()))
def test_every_field_of_a_response_is_asked_of_the_chat(name: str) -> None:
    fields = {name: (OTHERWISE | IN_A_RESPONSE)[name]}
    assert chat_with(fields) != chat_with({})


@pytest.mark.parametrize("name", ["background", "conversation", "max_tool_calls", "previous_response_id", "truncation"])
def test_what_a_response_cannot_have_is_refused(name: str) -> None:
    assert refused({name: OTHERWISE[name]}) == name


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in OF_OTHERS.items() for name in names.split()]
)
def test_a_field_of_others_is_refused_or_harmless(kind: type[Body], name: str) -> None:
    assert name not in kind.model_fields
    if name not in HARMLESS:
        with pytest.raises(ApiError, match=f"^{name}: ") as raised:
            refuse_unsupported({name: OTHERWISE[name]})
        assert raised.value.param == name
