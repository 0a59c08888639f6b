"""LlamaIndex's OpenAILike: completion, chat, stream, tools and structured output."""

import asyncio
from pathlib import Path
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.clients.demo import ANSWER, KEY, MODEL, PROMPT, TIMEOUT_S
from tests.clients.door import Door

MESSAGES = [ChatMessage(role="user", content=PROMPT)]


def check(url: str, _: Path) -> str:
    given: Any = {"model": MODEL, "api_base": f"{url}/v1", "api_key": KEY, "max_retries": 0, "timeout": TIMEOUT_S}
    assert OpenAILike(**given, is_chat_model=False).complete(PROMPT).text == ANSWER
    llm = OpenAILike(**given, is_chat_model=True, is_function_calling_model=True)
    assert llm.chat(MESSAGES).message.content == ANSWER
    assert "".join(part.delta for part in llm.stream_chat(MESSAGES)) == ANSWER
    assert asyncio.run(llm.achat(MESSAGES)).message.content == ANSWER
    assert isinstance(llm.structured_predict(Door, PromptTemplate(PROMPT)), Door)
    tool = FunctionTool.from_defaults(lambda code, floor: Door(code=code, floor=floor), name="door", fn_schema=Door)
    called = llm.predict_and_call([tool], user_msg=PROMPT, tool_required=True)
    assert isinstance(called.sources[0].raw_output, Door)
    return "completion, chat, stream, async, tools, structured output"
