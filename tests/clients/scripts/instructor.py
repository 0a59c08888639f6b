"""Instructor: an answer of a given form, by tools, by a JSON schema, and as partial objects of a stream."""

import asyncio
from pathlib import Path
from typing import Any

import instructor
import openai

from tests.clients.demo import KEY, MODEL, PROMPT, TIMEOUT_S
from tests.clients.door import Door

MODES = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)
GIVEN: Any = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_retries": 0}


def check(url: str, _: Path) -> str:
    at: Any = {"base_url": f"{url}/v1", "api_key": KEY, "max_retries": 0, "timeout": TIMEOUT_S}
    for mode in MODES:
        client = instructor.from_openai(openai.OpenAI(**at), mode=mode)
        assert isinstance(client.chat.completions.create(**GIVEN, response_model=Door), Door)
        (*_, last) = client.chat.completions.create_partial(**GIVEN, response_model=Door)
        Door.model_validate(last.model_dump())
        patient = instructor.from_openai(openai.AsyncOpenAI(**at), mode=mode)
        assert isinstance(asyncio.run(patient.chat.completions.create(**GIVEN, response_model=Door)), Door)
    return f"{', '.join(f'`{mode.name}`' for mode in MODES)}: whole, partial, async"
