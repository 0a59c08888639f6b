"""Long lists of token ids are read exactly as by pydantic, which gets all other bodies."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.spec.wire import TokenIds
from router.preprocess.body import _read_extracted, extract_ids
from router.preprocess.requests import CompletionRequest

LONG = [7, 151_935, 0, 2**31 - 1] * 300
SHORT = [7, 151_935, 0, 9_999_999] * 300
"""Ids of at most seven digits, which compiled code reads."""
SPOILT = [-1, 10**7, 2**31, 2**64, -(2**70), 10**40, 1.0, True, None, "7", [7]]
SCRAPS = [b"", b",", b'"', b"]", b"[", b"}", b"0", b"\\"]
SEPARATORS = [(",", ":"), (", ", ": "), (" ,\n", "\t:\r\n ")]
ASIDES: list[dict[str, Any]] = [
    {},
    {"user": 'a "prompt": [1, 2] b'},
    {"user": ', "prompt": [1, 2]'},
    {"user": "prompt"},
    {"kwargs": {"prompt": LONG}},
    {"kwargs": [{"prompt": LONG}, "]"]},
    {"ignore_eos": True, "max_tokens": 3, "logit_bias": {"5": 1.5}},
]


def read_by_pydantic(content: bytes) -> CompletionRequest | None:
    try:
        return CompletionRequest.model_validate_json(content)
    except ValidationError:
        return None


def read_extracting(content: bytes) -> CompletionRequest | None:
    extracted = extract_ids(content)
    return None if extracted is None else _read_extracted(extracted, CompletionRequest)


@given(
    before=st.sampled_from(ASIDES),
    after=st.sampled_from(ASIDES),
    spoilt=st.lists(st.tuples(st.integers(0, len(LONG) - 1), st.sampled_from(SPOILT)), max_size=1),
    separators=st.sampled_from(SEPARATORS),
    ids=st.sampled_from([LONG, SHORT]),
    broken=st.none() | st.tuples(st.integers(0, 10**6), st.sampled_from(SCRAPS)),
)
@settings(deadline=None)
def test_ids_equal_pydantics(
    before: dict[str, Any],
    after: dict[str, Any],
    spoilt: list[tuple[int, Any]],
    separators: tuple[str, str],
    ids: list[int],
    broken: tuple[int, bytes] | None,
) -> None:
    prompt: list[Any] = [*ids]
    for index, wrong in spoilt:
        prompt[index] = wrong
    fields = {"model": "m", **before, "prompt": prompt, **{f"{name}_2": value for name, value in after.items()}}
    content = json.dumps(fields, separators=separators).encode()
    if broken is not None:
        offset, put = broken[0] % len(content), broken[1]
        content = content[:offset] + put + content[offset + 1 :]
    expected = read_by_pydantic(content)
    found = read_extracting(content)
    if found is not None:
        assert expected is not None, "pydantic has refused it"
        assert isinstance(found.prompt, TokenIds)
        assert found.model_copy(update={"prompt": [*found.prompt]}) == expected


@pytest.mark.parametrize("ids", [LONG, SHORT])
@pytest.mark.parametrize("separators", SEPARATORS)
def test_long_lists_are_extracted(separators: tuple[str, str], ids: list[int]) -> None:
    content = json.dumps({"prompt": ids, "model": "m", "max_tokens": 3}, separators=separators).encode()
    body = read_extracting(content)
    assert body is not None
    assert body.prompt == TokenIds.of(ids)
    assert body.max_tokens == 3


@pytest.mark.parametrize(
    "content",
    [
        {"prompt": "7," * 2000, "model": "m"},
        {"prompt": [LONG, LONG], "model": "m"},
        {"prompt": [], "model": "m" * 3000},
        {"model": "m", "extra": {"prompt": LONG}, "prompt": [1]},
        {"model": "m", "extra": {"prompt": LONG}},
        {"prompt": LONG},
    ],
)
def test_anything_else_is_left_to_pydantic(content: dict[str, Any]) -> None:
    assert read_extracting(json.dumps(content).encode()) is None


def test_the_last_of_two_prompts_counts() -> None:
    content = b'{"model": "m", "prompt": %b, "prompt": [1]}' % json.dumps(LONG).encode()
    assert read_extracting(content) is None
    assert read_by_pydantic(content) == CompletionRequest(model="m", prompt=[1])


def test_a_placeholder_without_its_ids_is_text() -> None:
    extracted = extract_ids(json.dumps({"prompt": LONG, "model": "m"}).encode())
    assert extracted is not None
    body = CompletionRequest.model_validate_json(extracted[0])
    assert isinstance(body.prompt, str)
