"""Fields that constrain the form of an answer: OpenAI's, vLLM's and SGLang's."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Schema = Annotated[dict[str, Any] | bool | str, Field(union_mode="left_to_right")]
"""A JSON schema, or its text."""
SchemaObject = dict[str, Any] | bool
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=4096)]
Pattern = Annotated[str, Field(min_length=1)]

EXPECTED = {
    "tool_choice": '"none", "auto", "required", an object of type "function" that names one of the tools, or one of '
    'type "allowed_tools" with a mode, "auto" or "required", and at least one of the tools',
    **dict.fromkeys(("guided_json", "json_schema", "json"), "a JSON schema: an object, or its text"),
    "format": 'an object of type "text", "json_object" or "json_schema"; the last with "name" and "schema"',
    "response_format": 'an object of type "text", "json_object" or "json_schema"; the last with "json_schema": '
    '{"name": ..., "schema": {...}}',
}


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=(), populate_by_name=True)


class NamedSchema(_Part):
    """``response_format.json_schema``."""

    name: str | None = None
    schema_: SchemaObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(_Part):
    """vLLM's field for all forms; one is given."""

    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None

    @property
    def forms(self) -> dict[str, Any]:
        """The value of every form; null if not given."""
        given = {name: getattr(self, name) for name in ("regex", "choice", "grammar")}
        return given | {"json": self.json_, "json_object": self.json_object or None}


class Function(_Part):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    parameters: dict[str, Any] | None = None


class Tool(_Part):
    type: Literal["function"]
    function: Function


class FunctionName(_Part):
    name: str


class NamedTool(_Part):
    type: Literal["function"]
    function: FunctionName


class AllowedSet(_Part):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedTools(_Part):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedSet


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedTools, Field(union_mode="left_to_right")
]


def may_talk(choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None) -> bool:
    """Return whether an answer without a call is allowed."""
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
    return mode in (None, "none", "auto")
