"""What OpenAI's own client expects of an endpoint, from its synchronous and its asynchronous half alike."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from tests.fakes.model_folder import BOS, write_model_folder
from tests.fakes.openai_halves import all_of, done, final_of
from tests.fakes.router_cluster import CACHED_TOKENS, MODEL, RouterCluster, run_cluster
from tests.integration.router.test_tool_calls import ANSWER, ARGUMENTS, TEMPLATE, TOOLS

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


async def test_models(client: Any) -> None:
    assert [model.id for model in await all_of(client.models.list())] == [MODEL]
    assert (await done(client.models.retrieve(MODEL))).owned_by == "baton"


@pytest.mark.parametrize("prompt", ["abc", ["abc"], [BOS, *b"abc"], [[BOS, *b"abc"]]])
async def test_completions_of_every_kind_of_prompt(client: Any, prompt: Any) -> None:
    whole = await done(client.completions.create(model=MODEL, prompt=prompt, max_tokens=3))
    assert [choice.text for choice in whole.choices] == ["abc"]
    assert (whole.object, whole.choices[0].finish_reason) == ("text_completion", "length")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (4, 3, 7)
    assert whole.usage.prompt_tokens_details.cached_tokens == CACHED_TOKENS


async def test_choices_stop_and_echo_of_completions(client: Any) -> None:
    fields: Any = {"model": MODEL, "prompt": ["ab", "xyz"], "n": 2, "stop": "y", "echo": True, "max_tokens": 4}
    whole = await done(client.completions.create(**fields))
    texts = ["ababab", "ababab", "xyzx", "xyzx"]
    assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(texts))
    streamed = [""] * 4
    for chunk in await all_of(client.completions.create(**fields, stream=True)):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


async def test_log_probabilities_of_completions(client: Any) -> None:
    fields: Any = {"model": MODEL, "prompt": "abc", "max_tokens": 3, "logprobs": 1}
    whole = (await done(client.completions.create(**fields))).choices[0].logprobs
    assert (whole.tokens, whole.text_offset) == (["a", "b", "c"], [0, 1, 2])
    chunks = await all_of(client.completions.create(**fields, stream=True))
    told = [choice.logprobs for chunk in chunks for choice in chunk.choices]
    assert [token for logprobs in told for token in logprobs.tokens] == whole.tokens
    assert [value for logprobs in told for value in logprobs.token_logprobs] == whole.token_logprobs


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
        told = [entry for part in mine if part.logprobs for entry in part.logprobs.content]
        assert told == choice.logprobs.content
        assert [part.finish_reason for part in mine if part.finish_reason] == [choice.finish_reason] == ["length"]


async def test_tools_whole_and_as_a_stream(cluster: RouterCluster, client: Any) -> None:
    cluster.decode.says = ANSWER.encode()
    fields: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
    whole = (await done(client.chat.completions.create(**fields))).choices[0]
    final = (await final_of(client.chat.completions.stream(**fields), "get_final_completion")).choices[0]
    for choice in (whole, final):
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert calls == [("weather", ARGUMENTS)] * 2


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


async def test_responses_whole_and_as_a_stream(client: Any) -> None:
    fields: Any = {"model": MODEL, "input": "hi", "max_output_tokens": 8}
    whole = await done(client.responses.create(**fields))
    events = await all_of(client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert (whole.status, whole.output_text) == (last.status, last.output_text) == ("incomplete", "user>hi\n")
    assert whole.usage == last.usage


async def test_request_ids_and_raw_answers(client: Any) -> None:
    raw = await done(
        client.completions.with_raw_response.create(
            model=MODEL, prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "mine"}
        )
    )
    assert raw.headers["x-baton-prefill"] == "prefill-0"
    assert (await done(raw.parse()))._request_id == "mine"


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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_replica_that_fails_is_a_503(cluster: RouterCluster, client: Any, stream: bool) -> None:
    cluster.decode.fails = "no memory"
    with pytest.raises(openai.InternalServerError, match="no memory") as caught:
        await done(client.completions.create(model=MODEL, prompt="x", stream=stream))
    assert caught.value.status_code == 503


async def test_keys_and_limits(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: a, key: a-secret-of-a, tokens_per_minute: 1}\n")
    folder = write_model_folder(tmp_path / "model")
    for guarded in run_cluster(folder, api_keys_file=str(keys)):
        url = f"{guarded.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.completions.create(model=MODEL, prompt="x")
        async with openai.AsyncOpenAI(base_url=url, api_key="a-secret-of-a", max_retries=0) as known:
            await known.completions.create(model=MODEL, prompt="x", max_tokens=1)
            with pytest.raises(openai.RateLimitError) as caught:
                await known.completions.create(model=MODEL, prompt="x", max_tokens=1)
            assert int(caught.value.response.headers["retry-after"]) > 0


async def test_a_stream_that_is_left_ends_its_request(cluster: RouterCluster, client: Any) -> None:
    cluster.decode.token_s = 0.01
    try:
        stream = await done(client.completions.create(model=MODEL, prompt="abc", max_tokens=500, stream=True))
        if hasattr(stream, "__aiter__"):
            await anext(aiter(stream))
        else:
            next(iter(stream))
        await done(stream.close())
        cluster.assert_empty()
    finally:
        cluster.decode.token_s = 0.0


async def test_a_stream_that_fails_in_the_middle_raises(cluster: RouterCluster, client: Any) -> None:
    cluster.decode.fails_after, cluster.decode.token_s = 5, 0.1
    try:
        with pytest.raises(openai.APIError, match="decode-0: out of memory"):
            await all_of(client.completions.create(model=MODEL, prompt="abcdef", max_tokens=50, stream=True))
    finally:
        cluster.decode.fails_after, cluster.decode.token_s = None, 0.0
