"""Unit tests cannot reach the outside world: sockets, Ray, CUDA and Ray's processes raise."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

_RAY_PROGRAMS = {"ray", "raylet", "gcs_server"}


class ReachedOutsideError(BaseException):
    """A unit test used something real. Not an Exception, so that no handler under test swallows it."""


@pytest.fixture(autouse=True)
def no_kernels_of_other_tests() -> Iterator[None]:
    """Forget the native kernels that a test has registered for its process, since later ones expect plain torch."""
    yield
    if (module := sys.modules.get("workers.kernels.elementwise")) is not None:
        module._REGISTERED.clear()


@pytest.fixture(autouse=True)
def no_real_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make everything outside this process raise. A test that needs it belongs in tests/integration."""
    for name in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, _forbidden(f"socket.{name}"))
    monkeypatch.setattr(socket, "getaddrinfo", _forbidden("socket.getaddrinfo"))
    monkeypatch.setattr(subprocess.Popen, "__init__", _popen_without_ray(subprocess.Popen.__init__))
    # Only what a test module has imported is patched: importing Ray and torch here would cost seconds.
    for module, path in (
        ("ray", "init"),
        ("torch", "cuda._lazy_init"),
        ("zmq", "Socket.bind"),
        ("zmq", "Socket.connect"),
        ("zmq", "Socket.bind_to_random_port"),
    ):
        if module in sys.modules:
            monkeypatch.setattr(f"{module}.{path}", _forbidden(f"{module}.{path}"))


def _forbidden(name: str) -> Callable[..., NoReturn]:
    def raise_instead(*_: object, **__: object) -> NoReturn:
        raise ReachedOutsideError(f"a unit test called {name}; use a fake, or move the test to tests/integration")

    return raise_instead


def _popen_without_ray(original: Callable[..., None]) -> Callable[..., None]:
    def guarded(self: object, args: "str | os.PathLike[str] | Sequence[Any]", *rest: Any, **options: Any) -> None:
        words = args.split() if isinstance(args, str) else [args] if isinstance(args, os.PathLike) else list(args)
        if _RAY_PROGRAMS & {Path(os.fsdecode(word)).name for word in words[:3]}:
            _forbidden(f"subprocess with {words[0]}")()
        original(self, args, *rest, **options)

    return guarded
