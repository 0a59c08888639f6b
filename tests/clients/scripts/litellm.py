"""LiteLLM: its providers for servers that speak OpenAI's API."""

import asyncio
from pathlib import Path
from typing import Any

import litellm

from tests.clients.demo import ANSWER, KEY, MODEL, PROMPT, TIMEOUT_S
from tests.clients.door import Door

MESSAGES: Any = [{"role": "user", "content": PROMPT}]


def check(url: str, _: Path) -> str:
    at: Any = {"api_base": f"{url}/v1", "api_key": KEY, "timeout": TIMEOUT_S}
    for provider in ("openai", "hosted_vllm"):
        given = at | {"model": f"{provider}/{MODEL}", "messages": MESSAGES}
        assert litellm.completion(**given).choices[0].message.content == ANSWER
        chunks = litellm.completion(**given, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
        assert asyncio.run(litellm.acompletion(**given)).choices[0].message.content == ANSWER
        formed = litellm.completion(**given, response_format=Door).choices[0].message.content
        Door.model_validate_json(formed)
    # The provider `hosted_vllm` removes `additionalProperties` from tools, so the demo model would invent properties.
    tool = {"type": "function", "function": {"name": "door", "parameters": Door.model_json_schema()}}
    asked = at | {"model": f"openai/{MODEL}", "messages": MESSAGES}
    called = litellm.completion(**asked, tools=[tool], tool_choice="required").choices[0].message.tool_calls
    Door.model_validate_json(called[0].function.arguments)
    whole = litellm.text_completion(**at, model=f"text-completion-openai/{MODEL}", prompt=PROMPT)
    assert whole.choices[0].text == ANSWER
    response = litellm.responses(**at, model=f"openai/{MODEL}", input=PROMPT)
    assert response.output[-1].content[0].text == ANSWER
    return "`openai/`, `hosted_vllm/`: chat, stream, async, form; `openai/`: completion, tools, responses"
