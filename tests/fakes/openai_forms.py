"""What OpenAI's own client may ask of a cluster that serves ``recall``, form by form, of either half of the client."""

from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.fakes.openai_halves import all_of, done, final_of
from workers.models.recall import DEMO_ANSWER, DEMO_PROMPT

MODEL = "recall"
MESSAGES: Any = [{"role": "user", "content": DEMO_PROMPT}]
CHAT: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0}
_SIZE = {"type": "integer", "minimum": 0, "maximum": 999}
_PARAMETERS = {"type": "object", "properties": {"size": _SIZE}, "required": ["size"], "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": _PARAMETERS, "strict": True}}
    for name in ("set_size", "unset_size")
]


class Code(pydantic.BaseModel):
    """An answer of a given form."""

    word: Literal["tango", "zulu"]
    sure: bool


async def check_forms(client: Any) -> None:
    """Ask in every form; whole answers and streams must agree with each other and with what the model knows."""
    assert [model.id for model in await all_of(client.models.list())] == [MODEL]
    await _check_completions(client)
    await _check_chat(client)
    await _check_tools(client)
    await _check_structured(client)
    await _check_responses(client)
    await _check_errors(client)


async def _check_completions(client: Any) -> None:
    fields: Any = {"model": MODEL, "prompt": [DEMO_PROMPT, DEMO_PROMPT], "temperature": 0, "logprobs": 2}
    fields |= {"n": 2, "echo": True, "stop": " seven", "seed": 3}
    whole = await done(client.completions.create(**fields))
    assert [choice.text for choice in whole.choices] == [f"{DEMO_PROMPT} tango"] * 4
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    chunks = await all_of(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        mine = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        told = [logprob for part in mine if part.logprobs for logprob in part.logprobs.token_logprobs]
        assert told[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)


async def _check_chat(client: Any) -> None:
    fields: Any = CHAT | {"logprobs": True, "top_logprobs": 2}
    (whole,) = (await done(client.chat.completions.create(**fields))).choices
    final = (await final_of(client.chat.completions.stream(**fields), "get_final_completion")).choices[0]
    for choice in (whole, final):
        assert (choice.message.content, choice.finish_reason) == (DEMO_ANSWER, "stop")
        text = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
        assert text.decode().startswith(DEMO_ANSWER)
        assert {len(entry.top_logprobs) for entry in choice.logprobs.content} == {2}


async def _check_tools(client: Any) -> None:
    """The model knows nothing of tools: a grammar makes it call."""
    named: Any = {"type": "function", "function": {"name": "unset_size"}}
    some: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for choice in (named, some):
        fields: Any = CHAT | {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 5}
        fields |= {"temperature": 2, "max_tokens": 400}
        (whole,) = (await done(client.chat.completions.create(**fields))).choices
        final = (await final_of(client.chat.completions.stream(**fields), "get_final_completion")).choices[0]
        assert whole.finish_reason == final.finish_reason == "tool_calls"
        (call,), (again,) = whole.message.tool_calls, final.message.tool_calls
        assert call.function.name == again.function.name == "unset_size"
        assert call.function.arguments == again.function.arguments
        assert final.message.tool_calls[0].function.parsed_arguments.keys() == {"size"}


async def _check_structured(client: Any) -> None:
    fields: Any = {"model": MODEL, "temperature": 2, "seed": 6}
    whole = await done(client.chat.completions.parse(**fields, messages=MESSAGES, response_format=Code, max_tokens=400))
    assert isinstance(whole.choices[0].message.parsed, Code)
    del fields["seed"]
    response = await done(client.responses.parse(**fields, input=DEMO_PROMPT, text_format=Code, max_output_tokens=400))
    assert isinstance(response.output_parsed, Code)


async def _check_responses(client: Any) -> None:
    fields: Any = {"model": MODEL, "input": DEMO_PROMPT, "temperature": 0}
    whole = await done(client.responses.create(**fields))
    final = await final_of(client.responses.stream(**fields), "get_final_response")
    assert (whole.status, whole.output_text) == (final.status, final.output_text) == ("completed", DEMO_ANSWER)
    assert whole.usage.output_tokens == final.usage.output_tokens > 1


async def _check_errors(client: Any) -> None:
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError):
            await done(client.chat.completions.create(**CHAT | {"model": "other"}, stream=stream))
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await done(client.chat.completions.create(**CHAT, max_tokens=10**7, stream=stream))
