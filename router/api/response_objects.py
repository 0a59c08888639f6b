"""What clients of ``/v1/responses`` get, as OpenAI's API has it."""

from typing import Any, Literal

import msgspec

from router.api.responses import ChosenLogprob


class OutputText(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[ChosenLogprob] = []


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the answer."""

    type: Literal["message"] = "message"
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Where the prompt's KV came from."""

    cached_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer consists of."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Why the answer is not whole."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no answer."""

    code: str
    message: str


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What the text is written in."""

    type: Literal["text"] = "text"


class TextSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the text is written."""

    format: TextFormat = TextFormat()


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response as it stands."""

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
    output: list[OutputMessage] = []
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: bool = False
    temperature: float
    text: TextSettings = TextSettings()
    tool_choice: str = "auto"
    tools: list[Any] = []
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
