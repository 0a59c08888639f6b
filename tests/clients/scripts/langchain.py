"""LangChain's ChatOpenAI: invoke, stream, tools, structured output by both methods, and the Responses API."""

import asyncio
from pathlib import Path
from typing import Any

from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI

from tests.clients.demo import ANSWER, KEY, MODEL, PROMPT, TIMEOUT_S
from tests.clients.door import Door


def check(url: str, _: Path) -> str:
    given: Any = {"model": MODEL, "base_url": f"{url}/v1", "api_key": KEY, "max_retries": 0, "timeout": TIMEOUT_S}
    llms = (ChatOpenAI(**given), ChatOpenAI(**given, use_responses_api=True))
    for llm in llms:
        assert llm.invoke(PROMPT).text == ANSWER
        assert "".join(chunk.text for chunk in llm.stream(PROMPT)) == ANSWER
        for method in ("json_schema", "function_calling"):
            assert isinstance(llm.with_structured_output(Door, method=method).invoke(PROMPT), Door)
        _check_tool(llm)
    assert asyncio.run(_answers(llms)) == [ANSWER] * len(llms)
    return "chat, stream, async, tools and structured output, also by the Responses API"


def _check_tool(llm: Any) -> None:
    tool = StructuredTool.from_function(
        lambda code, floor: f"{code} {floor}", name="door", description="Open it.", args_schema=Door
    )
    (call, *_) = llm.bind_tools([tool], tool_choice="required", strict=True).invoke(PROMPT).tool_calls
    assert tool.invoke(call).content.split()[0] in ("tango", "zulu")


async def _answers(llms: Any) -> list[str]:
    """Return an answer of each. They share a connection pool, so one loop runs them all."""
    return [(await llm.ainvoke(PROMPT)).text for llm in llms]
