"""The real openai client against the router."""

from typing import Any

import openai
import pytest

from tests.fakes.router_cluster import CACHED_TOKENS, MODEL, RouterCluster

pytestmark = pytest.mark.integration


class TestOpenAiClient:
    def test_everything_it_offers_here(self, shared: RouterCluster) -> None:
        with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == [MODEL]
            assert client.models.retrieve(MODEL).id == MODEL
            assert client.completions.create(model=MODEL, prompt="hey", max_tokens=3).choices[0].text == "hey"
            messages: Any = [{"role": "user", "content": "hi"}]
            whole = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=8)
            assert whole.choices[0].message.content == "<user>hi"
            stream = client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True}
            )
            chunks = list(stream)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == "<user>hi"
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 8
            assert chunks[-1].usage.prompt_tokens_details is not None
            assert chunks[-1].usage.prompt_tokens_details.cached_tokens == CACHED_TOKENS

    def test_choices_and_logprobs(self, shared: RouterCluster) -> None:
        messages: Any = [{"role": "user", "content": "hi"}]
        with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
            chat = client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=2, n=3, logprobs=True, top_logprobs=2, logit_bias={"7": 1}
            )
            assert [choice.index for choice in chat.choices] == [0, 1, 2]
            for choice in chat.choices:
                assert choice.logprobs is not None
                assert choice.logprobs.content is not None
                first = choice.logprobs.content[0]
                assert (first.token, first.logprob, first.bytes) == ("<", -0.06, [60])
                assert [(top.token, top.logprob) for top in first.top_logprobs] == [("=", -0.125), (">", -0.25)]
            stream = client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=4, stream=True, logprobs=True
            )
            told = [chunk.choices[0].logprobs for chunk in stream]
            tokens = [entry.token for logprobs in told if logprobs for entry in logprobs.content or []]
            assert tokens == list("<use")
            completion = client.completions.create(model=MODEL, prompt="abc", max_tokens=3, logprobs=1)
            written = completion.choices[0].logprobs
            assert written is not None
            assert (written.tokens, written.text_offset) == (["a", "b", "c"], [0, 1, 2])
            assert written.token_logprobs == [-0.097, -0.098, -0.099]
            assert written.top_logprobs == [
                {"b": -0.125, "a": -0.097},
                {"c": -0.125, "b": -0.098},
                {"d": -0.125, "c": -0.099},
            ]

    def test_errors_are_its_own(self, shared: RouterCluster) -> None:
        with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.NotFoundError) as caught:
                client.completions.create(model="other", prompt="x")
            assert caught.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as refused:
                client.completions.create(model=MODEL, prompt="x", n=0)
            assert refused.value.param == "n"

    def test_failure_in_the_middle_of_a_stream(self, cluster: RouterCluster) -> None:
        cluster.decode.fails_after, cluster.decode.token_s = 5, 0.1
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(model=MODEL, prompt="abcdef", max_tokens=50, stream=True)
            text = ""
            with pytest.raises(openai.APIError, match="decode-0: out of memory"):  # noqa: PT012
                for chunk in stream:
                    text += chunk.choices[0].text
            assert text == "abc"
