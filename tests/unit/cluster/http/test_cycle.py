"""One HTTP request and its response: what is written when, and how an application hears of its client."""

import logging
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl

from cluster.http.cycle import LEFT_KEY, Cycle
from tests.fakes.wire import Wire


class Exchange:
    """Request whose body has arrived."""

    def __init__(self, method: str = "GET", version: str = "1.1", *, keep_alive: bool = True) -> None:
        self.wire, self.num_responses = Wire(), 0
        self.scope: Scope = {"type": "http", "method": method, "http_version": version}
        self.cycle = Cycle(
            self.scope,
            self.wire,
            FlowControl(self.wire),
            keep_alive=keep_alive,
            expects_continue=False,
            close=self.wire.close,
            on_response=self.count,
            on_taken=lambda: None,
            num_head_bytes=100,
        )
        self.cycle.more_body = False

    def count(self) -> None:
        self.num_responses += 1

    async def answer(self, *parts: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        pairs = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        await self.cycle.send({"type": "http.response.start", "status": status, "headers": pairs})
        for number, part in enumerate(parts):
            await self.cycle.send({"type": "http.response.body", "body": part, "more_body": number + 1 < len(parts)})


async def test_a_head_is_written_with_the_beginning_of_the_body() -> None:
    exchange = Exchange()
    await exchange.answer(b"ab", b"cd", headers={"content-length": "4", "a": "b"})
    assert exchange.wire.written == [b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\na: b\r\n\r\nab", b"cd"]
    assert (exchange.num_responses, exchange.cycle.response_complete, exchange.wire.is_closed) == (1, True, False)


async def test_a_body_of_unknown_length_is_chunked() -> None:
    exchange = Exchange()
    await exchange.answer(b"abc", b"", b"d" * 17)
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    assert exchange.wire.written == [head + b"3\r\nabc\r\n", b"11\r\n" + b"d" * 17 + b"\r\n0\r\n\r\n"]


async def test_an_answer_to_http_1_0_ends_with_the_connection() -> None:
    exchange = Exchange(version="1.0", keep_alive=False)
    await exchange.answer(b"abc", b"")
    assert exchange.wire.written == [b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nabc"]
    assert exchange.wire.is_closed


async def test_a_status_needs_no_name() -> None:
    exchange = Exchange()
    await exchange.answer(b"", status=499, headers={"content-length": "0"})
    assert exchange.wire.text == "HTTP/1.1 499 \r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304)])
async def test_some_answers_have_no_body(method: str, status: int) -> None:
    exchange = Exchange(method)
    await exchange.answer(b"", status=status)
    assert exchange.wire.text.startswith(f"HTTP/1.1 {status} ")
    assert exchange.wire.text.endswith("\r\n\r\n")
    assert "chunked" not in exchange.wire.text


async def test_the_body_of_an_answer_to_head_is_not_written() -> None:
    exchange = Exchange("HEAD")
    await exchange.answer(b"abc", headers={"content-length": "3"})
    assert exchange.wire.written == [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n"]


@pytest.mark.parametrize(("status", "is_closed"), [(200, False), (401, True)])
async def test_an_error_closes_the_connection_if_the_body_is_still_arriving(status: int, is_closed: bool) -> None:
    exchange = Exchange("POST")
    exchange.cycle.more_body = True
    await exchange.answer(b"", status=status)
    assert ("connection: close" in exchange.wire.text, exchange.wire.is_closed) == (is_closed, is_closed)


async def test_nothing_is_written_once_the_client_has_left() -> None:
    exchange = Exchange()
    exchange.cycle.leave()
    await exchange.answer(b"abc")
    assert (exchange.wire.written, await exchange.cycle.receive()) == ([], {"type": "http.disconnect"})


@pytest.mark.parametrize("is_early", [True, False])
async def test_an_application_hears_at_once_that_its_client_has_left(is_early: bool) -> None:
    exchange, calls = Exchange(), list[str]()
    departure = exchange.scope[LEFT_KEY]
    if is_early:
        exchange.cycle.leave()
    departure.expect(lambda: calls.append("left"))
    exchange.cycle.leave()
    assert calls == ["left"]


async def test_an_application_that_waits_no_more_hears_nothing() -> None:
    exchange = Exchange()
    departure = exchange.scope[LEFT_KEY]
    departure.expect(lambda: pytest.fail("called"))
    departure.forget()
    exchange.cycle.leave()


def failing(after: int) -> ASGIApp:
    """Return an application that fails after a number of messages."""
    messages: list[Message] = [
        {"type": "http.response.start", "status": 200, "headers": []},
        {"type": "http.response.body", "body": b"abc", "more_body": True},
    ]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        for message in messages[:after]:
            await send(message)
        raise ValueError("broken")

    return app


@pytest.mark.parametrize(
    ("after", "start"), [(0, "HTTP/1.1 500 Internal Server Error\r\n"), (1, ""), (2, "HTTP/1.1 200 OK\r\n")]
)
async def test_a_failing_application_closes_the_connection(
    after: int, start: str, caplog: pytest.LogCaptureFixture
) -> None:
    exchange = Exchange()
    with caplog.at_level(logging.ERROR):
        await exchange.cycle.run_asgi(failing(after))
    assert exchange.wire.is_closed
    assert exchange.wire.text.startswith(start)
    assert bool(exchange.wire.text) == bool(start)
    assert "a request failed" in caplog.text


async def test_an_incomplete_answer_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def app(*_: Any) -> None:
        """Answer nothing."""

    exchange = Exchange()
    await exchange.cycle.run_asgi(app)
    assert exchange.wire.text.startswith("HTTP/1.1 500 ")
    assert "did not complete its response" in caplog.text


async def test_a_client_that_waits_to_send_its_body_is_told_to() -> None:
    exchange = Exchange()
    exchange.cycle._expects_continue = True
    exchange.cycle.message_event.set()
    assert (await exchange.cycle.receive())["type"] == "http.request"
    assert exchange.wire.written == [b"HTTP/1.1 100 Continue\r\n\r\n"]
