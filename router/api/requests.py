"""Bodies of requests: OpenAI's fields, and those that vLLM and SGLang add. Others are kept apart, unread."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import ConfigDict, Field, WrapValidator

from router.api.body import Body, put_back
from router.api.constraint_fields import Choices, Pattern, ResponseFormat, Schema, StructuredOutputs, Tool, ToolChoice
from router.service import MinP, RepetitionPenalty, Temperature, TopK, TopP

Positive = Annotated[int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
DpRank = Annotated[int, Field(ge=0, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
NumLogprobs = Annotated[int, Field(ge=0, le=20)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
IdList = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    str | IdList | Texts | Annotated[list[IdList], Field(min_length=1, fail_fast=True)],
    Field(union_mode="left_to_right"),
    # Also turns the JSON into Python objects first, whose types a union distinguishes four times as fast.
    WrapValidator(put_back),
]
StopText = Annotated[str, Field(min_length=1)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Reasoning effort; models without levels think unless it is none."""

_STRICT = ConfigDict(extra="forbid")
"""Strict bodies for the administrator: a misspelt name would mean all replicas."""
_FORMS = frozenset(
    {"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
    | {"json_schema", "regex", "ebnf", "response_format"}
)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SaltedBody(Body):
    """A body with a prompt of one tenant."""

    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    extra_key: str | None = None

    @property
    def salt(self) -> str:
        """Prompts share cached pages only with prompts of the same salt."""
        return self.cache_salt or "" if not self.extra_key else f"{self.cache_salt or ''}\0{self.extra_key}"


class GenerationBody(SaltedBody):
    """Fields that completions and chat have in common."""

    model: str
    max_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    bad_words: Annotated[list[StopText], Field(max_length=256)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: (
        Annotated[StopText | Annotated[list[StopText], Field(max_length=16)], Field(union_mode="left_to_right")] | None
    ) = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    routed_dp_rank: DpRank | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    trace: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None
    json_schema: Schema | None = None
    regex: Pattern | None = None
    ebnf: Pattern | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def include_stop(self) -> bool:
        return bool(self.include_stop_str_in_output or self.no_stop_trim)

    @property
    def wants_form(self) -> bool:
        return not self.model_fields_set.isdisjoint(_FORMS)

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to report with each; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Likeliest tokens to report with each token of the prompt; None for no log-probabilities."""
        return self.prompt_logprobs


class CompletionRequest(GenerationBody):
    ids_field = "prompt"
    prompt: Prompt
    add_special_tokens: bool | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """``prompt_logprobs``, and with ``echo`` at least as many as of the answer."""
        echoed = self.logprobs if self.echo else None
        return max((num for num in (echoed, self.prompt_logprobs) if num is not None), default=None)


class TextPart(Body):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """A part in which a model declined to answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ChatMessage(Body):
    """One message; its further fields go to the chat template as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | list[TextPart | RefusalPart], Field(union_mode="left_to_right")] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as transformers' own server shows it to a template.

        Parts are joined, missing content is an empty text, and a tool call's arguments are an object. Clients return
        answers with null for every unset field, while templates ask whether a field is there.
        """
        given = {name: value for name, value in self.model_dump(exclude_unset=True).items() if value is not None}
        given["content"] = self._text()
        if (calls := given.get("tool_calls")) == []:
            del given["tool_calls"]
        elif isinstance(calls, list):
            given["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        if "reasoning" in given:  # vLLM's word, unknown to templates
            given.setdefault("reasoning_content", given["reasoning"])
        return given

    def _text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class TemplateBody(Body):
    """Fields of chat that its template reads."""

    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=1024)] | None = None
    reasoning_effort: Effort | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """The template's input besides the messages; tools that must not be called are in it too, for the cache."""
        written = [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]
        effort, others = self.reasoning_effort, self.chat_template_kwargs or {}
        thinking = {} if effort is None else {"enable_thinking": effort != "none", "reasoning_effort": effort}
        return ({"tools": written} if written else {}) | thinking | others


class ChatRequest(GenerationBody, TemplateBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    include_reasoning: bool | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(TemplateBody):
    """``POST /tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]


class TargetRequest(Body):
    """``POST /admin/...``: one replica, or without a name what the route says."""

    model_config = _STRICT
    replica: str | None = None


class PinRequest(TargetRequest, SaltedBody):
    """``POST /admin/pin``: a prompt as text or token ids; for one replica, or without a name for all."""

    model_config = _STRICT
    expected: ClassVar[Mapping[str, str]] = {"prompt": "a string, or a list of token ids; neither may be empty"}
    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[int], Field(min_length=1)]


def _with_parsed_arguments(call: Any) -> Any:
    """Parse a tool call's arguments, a JSON string in OpenAI's API; an empty one means none."""
    match call:
        case {"function": {"arguments": str(text)} as function}:
            with suppress(msgspec.DecodeError):
                return call | {"function": function | {"arguments": msgspec.json.decode(text.strip() or "{}")}}
    return call
