"""Bodies of generation requests: fields of OpenAI, vLLM and SGLang. Undeclared fields are kept separately."""

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, cast

import msgspec
from pydantic import Field, WrapValidator

from cluster.spec.wire import TokenIds
from router.preprocess.body import Body, put_back
from router.preprocess.model import MinP, RepetitionPenalty, Temperature, TopK, TopP

Positive = Annotated[int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
NumLogprobs = Annotated[int, Field(ge=0, le=20)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
IdList = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    str | IdList | Texts | Annotated[list[IdList], Field(min_length=1, fail_fast=True)],
    Field(union_mode="left_to_right"),
    # The validator gets Python objects, for which a union takes a quarter of the time that it takes for JSON.
    WrapValidator(put_back),
]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
"""Stop string. Each new token is compared with all of its beginnings."""
BadWord = Annotated[str, Field(min_length=1, max_length=256)]
Salt = Annotated[str, Field(min_length=1, max_length=1024)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Reasoning effort. Models without effort levels reason unless it is "none"."""
Verbosity = Literal["low", "medium", "high"]

Schema = Annotated[dict[str, Any] | bool | str, Field(union_mode="left_to_right")]
"""JSON schema, as an object or as text."""
SchemaObject = dict[str, Any] | bool
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=4096)]
Pattern = Annotated[str, Field(min_length=1)]

FORM_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "regex", "ebnf")
_CONSTRAINTS = frozenset({*FORM_FIELDS, "structured_outputs", "response_format"})


class NamedSchema(Body):
    name: str | None = None
    schema_: SchemaObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """vLLM's field for structured output; only one form can be given."""

    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None

    @property
    def forms(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in ("regex", "choice", "grammar")}
        return given | {"json": self.json_, "json_object": self.json_object or None}


class Function(Body):
    """Function of a tool. Templates write its fields in this order, which models know; undeclared ones follow."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class AllowedSet(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedSet


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedTools, Field(union_mode="left_to_right")
]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SaltedBody(Body):
    cache_salt: Salt | None = None
    extra_key: Annotated[str, Field(max_length=1024)] | None = None

    @property
    def salt(self) -> str:
        """Salt of the prompt's page keys. Only prompts with the same salt share cached pages."""
        return self.cache_salt or "" if not self.extra_key else f"{self.cache_salt or ''}\0{self.extra_key}"


class GenerationBody(SaltedBody):
    """Fields that completions and chat completions share."""

    prompt_field: ClassVar[str]
    default_tokens: ClassVar[int | None] = None
    """Default of ``max_tokens``; None means the model's, or as many as fit."""
    continues_prompt: ClassVar[bool] = False
    """True if the answer's text follows the prompt's."""
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
    logit_bias: Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=256)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: (
        Annotated[StopText | Annotated[list[StopText], Field(max_length=16)], Field(union_mode="left_to_right")] | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    routed_dp_rank: Annotated[int, Field(ge=0, lt=2**31)] | None = None
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
    def is_constrained(self) -> bool:
        """True if any field may constrain the form of the answer."""
        given = self.model_fields_set
        if given.isdisjoint(_CONSTRAINTS):
            return False
        return any(getattr(self, field) is not None for field in given & _CONSTRAINTS)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to report with each token; None reports no log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of most likely tokens to report with each prompt token; None reports no log-probabilities."""
        return self.prompt_logprobs


class CompletionRequest(GenerationBody):
    prompt_field = ids_field = "prompt"
    continues_prompt = True
    default_tokens = 16
    prompt: Prompt
    add_special_tokens: bool | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None

    @cached_property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        is_one = isinstance(self.prompt, str | TokenIds) or isinstance(self.prompt[0], int)
        return cast(Sequence[str | Sequence[int]], [self.prompt] if is_one else self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Value of ``prompt_logprobs``; with ``echo``, the larger of this value and ``logprobs``."""
        if not self.echo or self.logprobs is None:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)


class TextPart(Body):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ChatMessage(Body):
    """One message. Its undeclared fields are passed to the chat template unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | list[TextPart | RefusalPart], Field(union_mode="left_to_right")] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form in which transformers' own server passes it to a template.

        Parts are joined, missing content becomes an empty string, and a tool call's arguments become an object. Clients
        send answers back with null for every unset field, but templates test whether a field is present.
        """
        given = {name: value for name, value in self.model_dump(exclude_unset=True).items() if value is not None}
        content = self.content or ""
        given["content"] = content if isinstance(content, str) else "\n".join(part.text for part in content)
        if (calls := given.get("tool_calls")) == []:
            del given["tool_calls"]
        elif isinstance(calls, list):
            given["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        if "reasoning" in given:  # vLLM's name, unknown to templates
            given.setdefault("reasoning_content", given["reasoning"])
        return given


class TemplateBody(Body):
    """Fields that the chat template reads."""

    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=1024)] | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """Template variables besides the messages. Tools are included even if unused, to keep prefixes cacheable."""
        written = [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]
        effort, others = self.reasoning_effort, self.chat_template_kwargs or {}
        thinks = effort != "none"
        # DeepSeek's templates read the second one.
        thinking = {} if effort is None else {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": effort}
        verbosity = {} if self.verbosity is None else {"verbosity": self.verbosity}
        return ({"tools": written} if written else {}) | thinking | verbosity | others


class ChatRequest(GenerationBody, TemplateBody):
    prompt_field = "messages"
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    include_reasoning: bool | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class _Arguments(dict[str, Any]):
    """A call's arguments: an object for most templates, and JSON for DeepSeek's, which append it to a text."""

    def __radd__(self, before: str) -> str:
        return before + json.dumps(self, ensure_ascii=False)


def _with_parsed_arguments(call: Any) -> Any:
    """Parse a tool call's arguments, which are a JSON string in OpenAI's API. An empty string means no arguments."""
    match call:
        case {"function": {"arguments": str(text)} as function}:
            with suppress(msgspec.DecodeError, RecursionError):
                parsed = msgspec.json.decode(text.strip() or "{}")
                arguments = _Arguments(parsed) if isinstance(parsed, dict) else parsed
                return call | {"function": function | {"arguments": arguments}}
    return call
