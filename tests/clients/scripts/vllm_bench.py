"""`vllm bench serve`: the functions with which it sends requests and reads streams, while the first token is late.

All of vLLM is several gigabytes. These functions need only their own file.
"""

import asyncio
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import aiohttp

from tests.clients.demo import ANSWER, LATE_S, PROMPT

NUM_REQUESTS = 4
SOURCE = "benchmarks/lib/endpoint_request_func.py"


def check(url: str, _: Path) -> str:
    outputs = asyncio.run(_outputs(_bench(), url))
    for output in outputs:
        assert output.success, output.error
        assert output.generated_text == ANSWER
        assert output.ttft >= LATE_S
        assert output.output_tokens
    return f"{len(outputs)} streamed completions and chats whose first token comes after {LATE_S} s"


def _bench() -> Any:
    """Return the module without its package, which imports torch."""
    package = find_spec("vllm")
    assert package is not None
    assert package.submodule_search_locations is not None
    spec = spec_from_file_location("bench", Path(package.submodule_search_locations[0], SOURCE))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def _outputs(bench: Any, url: str) -> list[Any]:
    """Return the result of each request. All are sent at once."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/v1/models") as models:
            model = (await models.json())["data"][0]["id"]
        requests = []
        for path, send in (
            ("completions", bench.async_request_openai_completions),
            ("chat/completions", bench.async_request_openai_chat_completions),
        ):
            given = bench.RequestFuncInput(
                prompt=PROMPT, api_url=f"{url}/v1/{path}", prompt_len=16, output_len=64, model=model
            )
            requests += [send(given, session) for _ in range(NUM_REQUESTS // 2)]
        return await asyncio.gather(*requests)
