"""The driver of a cluster whose processes are fakes."""

import errno
import os
import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cluster.cli import up
from cluster.cli.running import Note, RunningCluster
from cluster.cli.start import StartProgress
from cluster.cli.stop_signals import StopSignals
from cluster.launch.launcher import Launcher
from cluster.processes import this_process
from tests.fakes.launching import CONFIG, WAIT_S
from tests.fakes.ray import World

pytestmark = pytest.mark.integration


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield StopSignals(lambda _: None)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Note]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with Note(RunningCluster(name="one", process=this_process(), model="m", logs="", token="token")) as written:
        yield written


def test_routers_are_watched_even_if_the_cluster_cannot_be_announced(
    signals: StopSignals, note: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard output is redirected to a full disk."""
    watched, seen = queue.SimpleQueue[str](), list[str]()

    def refuse(_: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def stop() -> None:
        with suppress(queue.Empty):
            seen.append(watched.get(timeout=5.0))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("cluster.cli.start.wait_ready", lambda *_: None)
    monkeypatch.setattr("cluster.cli.up.typer.echo", refuse)
    monkeypatch.setattr(Launcher, "follow_router", lambda _, name, __: watched.put(name))
    stopping = threading.Thread(target=stop)
    stopping.start()
    up._supervise(World().tools(), CONFIG, "model", note, StartProgress(), signals)
    stopping.join(WAIT_S)
    assert seen == ["router"]
