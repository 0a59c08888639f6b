"""The prompts of `baton bench router`."""

import json

import pytest

from cluster.bench.http_load import request_of
from cluster.bench.router_speed import Prompts

PAGE_SIZE = 64


def prompts_of(prompt_len: int, known_share: float) -> list[tuple[int, ...]]:
    body = {"model": "mock", "prompt": list(range(300, 300 + prompt_len)), "max_tokens": 1}
    prompts = Prompts(request_of("http://x", "/v1/completions", body), prompt_len, known_share)
    drawn = []
    for _ in range(100):
        head, _, content = prompts.draw().partition(b"\r\n\r\n")
        assert b"Content-Length: %d" % len(content) in head
        drawn.append(tuple(json.loads(content)["prompt"]))
    return drawn


@pytest.mark.parametrize("prompt_len", [1, 32, 256])
def test_prompts_nobody_asked_before_differ_in_their_first_page_and_are_as_long(prompt_len: int) -> None:
    known = tuple(range(300, 300 + prompt_len))
    drawn = prompts_of(prompt_len, 0.5)
    new = [prompt for prompt in drawn if prompt != known]
    assert all(len(prompt) == prompt_len for prompt in drawn)
    assert 20 < len(new) < 80
    assert all(prompt[PAGE_SIZE:] == known[PAGE_SIZE:] for prompt in new)
    if prompt_len >= 8:
        assert len({prompt[:PAGE_SIZE] for prompt in new}) == len(new)


def test_all_prompts_can_be_known_or_none() -> None:
    assert len(set(prompts_of(256, 1.0))) == 1
    assert len(set(prompts_of(256, 0.0))) == 100
