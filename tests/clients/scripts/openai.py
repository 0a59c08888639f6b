"""OpenAI's own client: chats, completions, tools, structured output and responses, each way it can call."""

import asyncio
from pathlib import Path
from typing import Any

import openai

from tests.clients.demo import ANSWER, KEY, MODEL, PROMPT, TIMEOUT_S
from tests.clients.door import Door

MESSAGES: Any = [{"role": "user", "content": PROMPT}]


def check(url: str, _: Path) -> str:
    given: Any = {"base_url": f"{url}/v1", "api_key": KEY, "max_retries": 0, "timeout": TIMEOUT_S}
    with openai.OpenAI(**given) as client:
        _check_chats(client)
        _check_forms(client)
        _check_responses(client)
    asyncio.run(_check_async(openai.AsyncOpenAI(**given)))
    return "chat, completion, stream, async, tools, structured output, responses"


def _check_chats(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert chat.choices[0].message.content == ANSWER
    assert client.completions.create(model=MODEL, prompt=PROMPT).choices[0].text == ANSWER
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        assert stream.get_final_completion().choices[0].message.content == ANSWER
    assert [model.id for model in client.models.list()] == [MODEL]


def _check_forms(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Door)]
    called = client.chat.completions.parse(model=MODEL, messages=MESSAGES, tools=tools, tool_choice="required")
    calls = called.choices[0].message.tool_calls or []
    assert isinstance(calls[0].function.parsed_arguments, Door)
    formed = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Door)
    assert isinstance(formed.choices[0].message.parsed, Door)


def _check_responses(client: openai.OpenAI) -> None:
    assert client.responses.create(model=MODEL, input=PROMPT).output_text == ANSWER
    with client.responses.stream(model=MODEL, input=PROMPT) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == ANSWER
    assert isinstance(client.responses.parse(model=MODEL, input=PROMPT, text_format=Door).output_parsed, Door)


async def _check_async(client: openai.AsyncOpenAI) -> None:
    async with client:
        chats = [client.chat.completions.create(model=MODEL, messages=MESSAGES) for _ in range(4)]
        assert [chat.choices[0].message.content for chat in await asyncio.gather(*chats)] == [ANSWER] * 4
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ANSWER
