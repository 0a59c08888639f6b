"""Connection of a client to a small application, without sockets."""

import asyncio
from collections.abc import Callable

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from cluster.http.connection import BoundedHttpProtocol
from cluster.http.refusal import Refusal
from tests.fakes.wire import Wire

IDLE_S = 0.1


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond by path: /unread and /refused without reading the body, /wait never, others with the body's size."""
    size, status = 0, 200
    match scope["path"]:
        case "/unread":
            await asyncio.sleep(2 * IDLE_S)  # longer than an idle connection is kept open
        case "/refused":
            status = 401
        case "/wait":
            while (await receive())["type"] != "http.disconnect":
                continue
            return
        case _:
            while (event := await receive())["type"] == "http.request":
                size += len(event.get("body", b""))
                if not event.get("more_body"):
                    break
            else:
                return
    await PlainTextResponse(f"read {size}.", status)(scope, receive, send)


class Protocol(BoundedHttpProtocol):
    head_s = body_s = IDLE_S

    def refused(self, refusal: Refusal) -> ASGIApp:
        return PlainTextResponse(f"{refusal.code}: {refusal}", refusal.status)


class Connection:
    """Connection of a client to ``answer``."""

    def __init__(self) -> None:
        config = uvicorn.Config(answer, lifespan="off", log_config=None, timeout_keep_alive=IDLE_S, ws="none")  # type: ignore[arg-type]
        config.load()
        self.state = ServerState()
        self.wire = Wire()
        self.protocol = Protocol(config, self.state, {}, asyncio.get_running_loop())
        self.protocol.connection_made(self.wire)

    def send(self, *packets: bytes) -> None:
        for packet in packets:
            self.protocol.data_received(packet)

    async def answers(self, number: int = 1) -> list[str]:
        """Return the status lines and bodies of the first responses."""
        await settle(lambda: self.wire.text.count("HTTP/1.1 ") >= number and not self.state.tasks)
        return [
            said.split("\r\n")[0] + "|" + said.rpartition("\r\n\r\n")[2]
            for said in self.wire.text.split("HTTP/1.1 ")[1:]
        ]

    async def refusal(self, num_before: int = 0) -> str:
        """Return the last response's status and body; check that the client can read it before the connection ends."""
        *_, last = await self.answers(num_before + 1)
        assert self.wire.text.count("connection: close") == 1
        assert self.wire.has_eof
        assert not self.wire.is_closed
        self.send(b"GET / HTTP/1.1\r\n\r\n" * 9)
        assert len(await self.answers()) == num_before + 1
        return last


async def settle(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.01)


def post(path: str = "/", *headers: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: x", *headers, "", ""]).encode()
