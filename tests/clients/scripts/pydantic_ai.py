"""Pydantic AI: agents with text, a form by tools or by a JSON schema, and a stream, for both of OpenAI's APIs."""

from pathlib import Path
from typing import Any

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.demo import ANSWER, KEY, MODEL, PROMPT
from tests.clients.door import Door


def check(url: str, _: Path) -> str:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    for model in (OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider)):
        assert Agent(model).run_sync(PROMPT).output == ANSWER
        assert Agent(model).run_stream_sync(PROMPT).get_output() == ANSWER
        for output in (ToolOutput(Door), NativeOutput(Door)):
            agent: Any = Agent(model, output_type=output, retries=0)
            assert isinstance(agent.run_sync(PROMPT).output, Door)
    return "text, stream, `ToolOutput` and `NativeOutput`, also by the Responses API"
