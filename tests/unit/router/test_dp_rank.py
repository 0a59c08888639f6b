"""What asks for a DP rank: read where some side has such a rank, refused in words elsewhere."""

import pytest
from starlette.requests import Request

from cluster.spec.config import DeployConfig
from router.api.errors import ApiError
from router.api.front import dp_rank_of
from router.api.requests import TokensRequest

CONFIG = DeployConfig.model_validate({"prefill": {"parallel": {"dp": 2}}, "decode": {"parallel": {"dp": 4}}})


def request(value: str | None) -> Request:
    headers = [] if value is None else [(b"x-data-parallel-rank", value.encode())]
    return Request({"type": "http", "headers": headers})


def body(**fields: int) -> TokensRequest:
    return TokensRequest.model_validate({"model": "m", "prompt_ids": [1], **fields})


@pytest.mark.parametrize(("value", "expected"), [(None, None), ("0", 0), ("3", 3)])
def test_a_rank_of_either_side_is_taken(value: str | None, expected: int | None) -> None:
    assert dp_rank_of(request(value), CONFIG, body()) == expected


@pytest.mark.parametrize("name", ["routed_dp_rank", "data_parallel_rank"])
def test_a_field_of_sglang_asks_for_the_same(name: str) -> None:
    assert dp_rank_of(request(None), CONFIG, body(**{name: 3})) == 3
    assert dp_rank_of(request("1"), CONFIG, body(**{name: 3})) == 1
    with pytest.raises(ApiError, match=f"{name}: got 4; allowed: 0 to 3"):
        dp_rank_of(request(None), CONFIG, body(**{name: 4}))


@pytest.mark.parametrize("value", ["4", "-1", "one", ""])
def test_what_is_no_rank_is_refused_with_what_is_allowed(value: str) -> None:
    with pytest.raises(ApiError, match=f"X-data-parallel-rank: got '{value}'; allowed: 0 to 3"):
        dp_rank_of(request(value), CONFIG, body())
