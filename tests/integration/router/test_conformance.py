"""Expectations of OpenAI's own client, for its synchronous and its asynchronous half."""

import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.fakes.model_folder import write_model_folder
from tests.fakes.router_cluster import MODEL, RouterCluster, run_cluster
from tests.integration.router.test_tool_calls import TEMPLATE


async def done(result: Any) -> Any:
    """Return the result of either client."""
    return await result if inspect.isawaitable(result) else result


async def all_of(stream: Any) -> list[Any]:
    """Return everything that either client's stream yields."""
    stream = await done(stream)
    return [item async for item in stream] if hasattr(stream, "__aiter__") else list(stream)


async def final_of(manager: Any, method: str) -> Any:
    """Return the final result of the client's own stream accumulator."""
    if hasattr(manager, "__aenter__"):
        async with manager as stream:
            return await getattr(stream, method)()
    with manager as stream:
        return getattr(stream, method)()


pytestmark = pytest.mark.integration

MESSAGES: Any = [{"role": "user", "content": "hi"}]


class Place(pydantic.BaseModel):
    city: str
    days: list[int]


BERN = Place(city="Bern", days=[1, 2])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterCluster]:
    yield from run_cluster(write_model_folder(tmp_path_factory.mktemp("model"), template=TEMPLATE))


@pytest.fixture(params=[openai.OpenAI, openai.AsyncOpenAI])
async def client(request: pytest.FixtureRequest, cluster: RouterCluster) -> AsyncIterator[Any]:
    client = request.param(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    yield client
    await done(client.close())
    cluster.decode.says = cluster.decode.fails = None
    cluster.assert_empty()


async def test_chat_whole_and_as_a_stream(client: Any) -> None:
    fields: Any = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 8, "n": 2, "top_logprobs": 2}
    whole = await done(client.chat.completions.create(**fields, logprobs=True))
    assert [choice.index for choice in whole.choices] == [0, 1]
    stream = client.chat.completions.create(
        **fields, logprobs=True, stream=True, stream_options={"include_usage": True}
    )
    chunks = await all_of(stream)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 16)
    for choice in whole.choices:
        mine = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        entries = [entry for part in mine if part.logprobs for entry in part.logprobs.content]
        assert entries == choice.logprobs.content
        assert [part.finish_reason for part in mine if part.finish_reason] == [choice.finish_reason] == ["length"]


async def test_answers_are_parsed(cluster: RouterCluster, client: Any) -> None:
    cluster.decode.says = BERN.model_dump_json().encode()
    chat: Any = {"model": MODEL, "messages": MESSAGES, "response_format": Place}
    whole = await done(client.chat.completions.parse(**chat))
    final = await final_of(client.chat.completions.stream(**chat), "get_final_completion")
    assert whole.choices[0].message.parsed == final.choices[0].message.parsed == BERN
    response = await done(client.responses.parse(model=MODEL, input="hi", text_format=Place))
    streamed = await final_of(client.responses.stream(model=MODEL, input="hi", text_format=Place), "get_final_response")
    assert response.output_parsed == streamed.output_parsed == BERN
    assert cluster.last_submit().sampling.grammar


@pytest.mark.parametrize(
    ("fields", "kind", "status"),
    [
        ({"model": "other", "prompt": "x"}, openai.NotFoundError, 404),
        ({"model": MODEL, "prompt": "x", "n": 0}, openai.BadRequestError, 400),
        ({"model": MODEL, "prompt": "x" * 600}, openai.BadRequestError, 400),
        ({"model": MODEL, "prompt": "x", "suffix": "y"}, openai.BadRequestError, 400),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_are_the_clients_own(
    client: Any, fields: Any, kind: type[openai.APIStatusError], status: int, stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        await done(client.completions.create(**fields, stream=stream))
    assert caught.value.status_code == status
    assert isinstance(caught.value.body, dict)
    assert set(caught.value.body) == {"message", "type", "param", "code"}


async def test_a_stream_that_fails_in_the_middle_raises(cluster: RouterCluster, client: Any) -> None:
    cluster.decode.fails_after, cluster.decode.token_s = 5, 0.1
    try:
        with pytest.raises(openai.APIError, match="decode-0: out of memory"):
            await all_of(client.completions.create(model=MODEL, prompt="abcdef", max_tokens=50, stream=True))
    finally:
        cluster.decode.fails_after, cluster.decode.token_s = None, 0.0
