"""The usage of a response says where its prompt came from, as that of a chat does."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.api.response_request import ResponseRequest
from router.api.response_writer import ResponseWriter
from router.api.responses import PromptTokensDetails, Usage
from router.message import MessageReader
from router.service import Service


@pytest.mark.parametrize("tiers", [{}, {"host_tokens": 16, "storage_tokens": 8}])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_tokens_of_lower_tiers_are_told_and_left_out_where_there_are_none(
    tiers: dict[str, int], is_streamed: bool
) -> None:
    service = cast(Service, SimpleNamespace(tokenizer=None, model="m"))
    body = ResponseRequest.model_validate({"model": "m", "input": "a"})
    writer = ResponseWriter("x", service, body, MessageReader())
    details = PromptTokensDetails(cached_tokens=32, **tiers)
    usage = Usage(prompt_tokens=40, completion_tokens=2, total_tokens=42, prompt_tokens_details=details)
    assert told(writer, usage, is_streamed=is_streamed)["input_tokens_details"] == {"cached_tokens": 32} | tiers


def told(writer: ResponseWriter, usage: Usage, *, is_streamed: bool) -> dict[str, Any]:
    if not is_streamed:
        return cast("dict[str, Any]", json.loads(writer.whole(usage))["usage"])
    *_, last = writer.closing(usage).decode().strip().split("data: ")
    return cast("dict[str, Any]", json.loads(last)["response"]["usage"])
