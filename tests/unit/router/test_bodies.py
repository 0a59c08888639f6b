"""Memory for bodies that arrive or wait to be read: its limit, and the shares of tenants."""

from http import HTTPStatus

import pytest
from starlette.requests import Request
from starlette.types import Message

from router.api.front import Arrival, Bodies
from router.errors import ApiError

MOST = 100


def request_of(tenant: str, *parts: bytes) -> Request:
    """Return a request whose body arrives in parts."""
    arrival = Arrival(request_id="", arrived_s=0.0, headers={}, tenant=tenant)
    left = [*parts]

    async def receive() -> Message:
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    return Request({"type": "http", "baton.arrival": arrival}, receive)


def large(tenant: str) -> Request:
    return request_of(tenant, b"x" * (MOST - 1), b"x")


async def test_a_tenant_may_hold_as_much_as_is_free() -> None:
    bodies = Bodies(MOST)
    held = [large("mallory") for _ in range(4)]
    for request in held:
        assert await bodies.receive(request) == b"x" * MOST
    refused = large("mallory")
    with pytest.raises(ApiError, match=f"take {5 * MOST - 1} bytes; allowed: {4 * MOST} now") as caught:
        await bodies.receive(refused)
    assert caught.value.status == HTTPStatus.SERVICE_UNAVAILABLE
    bodies.release(refused)
    others = [large("alice"), large("alice")]
    for request in others:
        await bodies.receive(request)
    for request in (*held, *others):
        bodies.release(request)
        bodies.release(request)
    for _ in range(4):
        await bodies.receive(large("mallory"))


async def test_a_body_that_arrives_with_its_head_takes_no_share() -> None:
    bodies = Bodies(MOST)
    for _ in range(50):
        assert await bodies.receive(request_of("mallory", b"x" * MOST)) == b"x" * MOST


async def test_a_body_that_grows_too_large_is_refused() -> None:
    request = request_of("mallory", *([b"x" * (MOST // 2)] * 3))
    with pytest.raises(ApiError, match=f"the body is larger than {MOST} bytes"):
        await Bodies(MOST).receive(request)
