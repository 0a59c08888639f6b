"""The usage of a response says where its prompt came from, as that of a chat does."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import BaseModel

from router.api.response_request import ResponseRequest
from router.api.response_writer import ResponseWriter
from router.api.responses import PromptTokensDetails, Usage
from router.message import MessageReader
from router.service import SamplingDefaults, Service


@pytest.mark.parametrize("tiers", [{}, {"host_tokens": 16, "storage_tokens": 8}])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_tokens_of_lower_tiers_are_told_and_left_out_where_there_are_none(
    tiers: dict[str, int], is_streamed: bool
) -> None:
    service = cast(
        Service, SimpleNamespace(tokenizer=None, model=SimpleNamespace(name="m", sampling_defaults=SamplingDefaults()))
    )
    body = ResponseRequest.model_validate({"model": "m", "input": "a"})
    shape = ResponseWriter("x", service, body, MessageReader())
    details = PromptTokensDetails(cached_tokens=32, **tiers)
    usage = Usage(prompt_tokens=40, completion_tokens=2, total_tokens=42, prompt_tokens_details=details)
    written = told(shape, usage, is_streamed=is_streamed)
    assert written["input_tokens_details"] == {"cached_tokens": 32, "cache_write_tokens": 0} | tiers
    assert written["input_tokens_details"].keys() >= fields_of(InputTokensDetails)
    assert written["output_tokens_details"].keys() >= fields_of(OutputTokensDetails)


def fields_of(model: type[BaseModel]) -> set[str]:
    """Those that OpenAI's client takes for granted."""
    return {name for name, field in model.model_fields.items() if field.is_required()}


def told(shape: ResponseWriter, usage: Usage, *, is_streamed: bool) -> dict[str, Any]:
    if not is_streamed:
        return cast("dict[str, Any]", json.loads(shape.whole([[]], usage))["usage"])
    *_, last = shape.closing(usage).decode().strip().split("data: ")
    return cast("dict[str, Any]", json.loads(last)["response"]["usage"])
