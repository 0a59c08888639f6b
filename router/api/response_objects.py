"""Bodies of answers of ``/v1/responses``, in OpenAI's form."""

from typing import Any, Literal

import msgspec

from router.api.responses import ChosenLogprob, PromptTokensDetails

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ChosenLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputThoughts(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: str | None = None


class OutputCall(msgspec.Struct, frozen=True, kw_only=True, tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputThoughts | OutputCall


class InputTokensDetails(PromptTokensDetails, frozen=True, kw_only=True, omit_defaults=True):
    cache_write_tokens: int
    """Tokens that OpenAI charges for; always 0 here."""


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    code: str | None
    message: str


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
