"""Connections of the bootstrap service: those with the token do not wait behind strangers at the same address."""

import asyncio

import pytest
import uvicorn
from uvicorn.server import ServerState

from cluster.bootstrap.service import BootstrapProtocol, create_app
from cluster.bootstrap.table import BootstrapTable
from cluster.spec.clock import SystemClock
from tests.fakes.wire import Wire


class Protocol(BootstrapProtocol):
    authorization = b"Bearer token"


@pytest.mark.parametrize(("given", "is_member"), [("Bearer token", True), ("Bearer other", False), ("", False)])
async def test_members_take_turns_with_all_strangers_together(given: str, is_member: bool) -> None:
    app = create_app(BootstrapTable(3.0, first_version=1), "token", SystemClock())
    config = uvicorn.Config(app, lifespan="off", log_config=None, ws="none")
    config.load()
    protocol = Protocol(config, ServerState(), {}, asyncio.get_running_loop())
    protocol.connection_made(Wire())
    stranger = protocol.address
    protocol.data_received(f"GET /health HTTP/1.1\r\nauthorization: {given}\r\n\r\n".encode())
    assert (protocol.address != stranger) == is_member
    assert protocol.client_of({}) == protocol.address
    protocol.connection_lost(None)
