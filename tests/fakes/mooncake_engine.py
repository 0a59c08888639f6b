"""Fake Mooncake engines inside one process, which reach registered memory addresses only."""

import ctypes
import json
import sys
from collections.abc import Callable, Sequence
from itertools import count
from types import ModuleType
from typing import Any

import pytest

_BACKEND = "transfer.backends.mooncake"


class FakeFabric:
    """All engines in one test."""

    def __init__(self) -> None:
        self.engines: dict[str, FakeEngine] = {}
        self.cards = ["mlx5_0"]
        self.refuses: Callable[[int], bool] = lambda _: False
        """Function that tells whether memory at an address cannot be registered."""
        self.moved: list[tuple[int, int, int]] = []
        """Source, target and length of each copy."""
        self._ports = count(12001)

    @classmethod
    def installed(cls, patch: pytest.MonkeyPatch) -> "FakeFabric":
        """Return a fabric whose engines stand in for Mooncake's."""
        fabric = cls()
        engine: Any = ModuleType("mooncake.engine")
        engine.TransferEngine = fabric.make
        patch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
        patch.setitem(sys.modules, "mooncake.engine", engine)
        patch.setitem(sys.modules, _BACKEND, ModuleType(_BACKEND))
        del sys.modules[_BACKEND]  # it is imported again with this engine, and removed afterwards
        patch.delenv("MC_FORCE_TCP", raising=False)
        return fabric

    def make(self) -> "FakeEngine":
        """Return a new engine, in place of ``TransferEngine()``."""
        return FakeEngine(self, next(self._ports))


class FakeEngine:
    """Methods of an engine that MooncakeBackend uses."""

    def __init__(self, fabric: FakeFabric, port: int) -> None:
        self._fabric, self._port = fabric, port
        self.registered: dict[int, int] = {}
        self.protocol = ""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        """Accept any protocol. A real engine without a network card falls back to TCP without an error."""
        assert (metadata, devices) == ("P2PHANDSHAKE", "")
        self.protocol = protocol
        self._fabric.engines[f"{host}:{self._port}"] = self
        return 0

    def get_rpc_port(self) -> int:
        return self._port

    def get_local_topology(self) -> str:
        return json.dumps({"cpu:0": [self._fabric.cards, []]})

    def register_memory(self, address: int, num_bytes: int) -> int:
        if self._fabric.refuses(address):
            return -202
        self.registered[address] = num_bytes
        return 0

    def unregister_memory(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else -1

    def batch_transfer_sync_write(
        self, session: str, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]
    ) -> int:
        return self._move(session, zip(sources, targets, sizes, strict=True), is_write=True)

    def batch_transfer_sync_read(
        self, session: str, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]
    ) -> int:
        return self._move(session, zip(sources, targets, sizes, strict=True), is_write=False)

    def _move(self, session: str, moves: "zip[tuple[int, int, int]]", *, is_write: bool) -> int:
        peer = self._fabric.engines[session]
        owners = (self, peer) if is_write else (peer, self)
        for source, target, size in moves:
            if not all(owner.holds(address, size) for owner, address in zip(owners, (source, target), strict=True)):
                return -1
            ctypes.memmove(target, source, size)
            self._fabric.moved.append((source, target, size))
        return 0

    def holds(self, address: int, num_bytes: int) -> bool:
        return any(first <= address and address + num_bytes <= first + size for first, size in self.registered.items())
