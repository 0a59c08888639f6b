"""Network cut during a Mooncake write: how late bytes arrive after the writer has given up."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from cluster.spec.registry import Endpoint
from tests.chaos.host_loss import MARKS
from tests.chaos.two_hosts import AWAY, HOME, SPACE, cable, cut

pytestmark = MARKS

SIZE = 64 << 20
CUT_S = 45.0
"""Duration longer than the transport's own timeouts."""
LOOK_S = 0.2


class Receiver:
    """Decode's side, on the other host."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin
        assert process.stdout
        self._to, self._from = process.stdin, process.stdout
        self.endpoint = msgspec.json.decode(self._from.readline(), type=Endpoint)

    def held(self) -> dict[int, int]:
        """Return how often each byte value occurs in the region."""
        self._to.write("bytes\n")
        self._to.flush()
        return msgspec.json.decode(self._from.readline(), type=dict[int, int])


@contextmanager
def receiver() -> Iterator[Receiver]:
    away = ["ip", "netns", "exec", SPACE, sys.executable, "-m", "tests.integration.transfer_peer"]
    command = [*away, "mooncake", str(SIZE), AWAY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Receiver(process)
        finally:
            process.kill()


@contextmanager
def sender(target: Endpoint) -> Iterator["subprocess.Popen[str]"]:
    """Yield a process that has completed some writes and continues with the next one."""
    command = [sys.executable, "-m", "tests.chaos.endless_writer", HOME]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(msgspec.json.encode(target).decode() + "\n")
        process.stdin.flush()
        assert [process.stdout.readline() for _ in range(3)] == ["1\n", "2\n", "3\n"]
        try:
            yield process
        finally:
            process.kill()


def settle_s() -> float:
    from transfer.backends.mooncake import MooncakeBackend

    return MooncakeBackend.settle_s


def seconds_to_change(far: Receiver, before: dict[int, int], end_s: float) -> float | None:
    """Return the seconds until the bytes change, or None if they do not in time."""
    start_s = time.monotonic()
    while time.monotonic() < end_s:
        if far.held() != before:
            return time.monotonic() - start_s
        time.sleep(LOOK_S)
    return None


@pytest.fixture
def far() -> Iterator[Receiver]:
    with cable(), receiver() as far:
        yield far


def test_bytes_of_a_dead_sender_arrive_while_its_pages_settle(far: Receiver) -> None:
    with sender(far.endpoint) as process:
        with cut():
            process.kill()
            process.wait()
            gone_s = time.monotonic()
            before = far.held()
            assert len(before) == 2, f"the cut was not in a write: {before}"
            assert seconds_to_change(far, before, gone_s + CUT_S) is None
        assert seconds_to_change(far, before, gone_s + settle_s()) is not None
    print(f"bytes came {time.monotonic() - gone_s:.1f} s after the end of their sender")


def test_bytes_of_a_failed_write_arrive_while_its_pages_settle(far: Receiver) -> None:
    with sender(far.endpoint) as process:
        assert process.stdout
        with cut():
            lines = list(process.stdout)
            failed_s = time.monotonic()
            assert lines[-1] == "failed\n"
            before = far.held()
            assert len(before) == 2, f"the cut was not in a write: {before}"
            assert seconds_to_change(far, before, failed_s + 5.0) is None
        assert seconds_to_change(far, before, failed_s + settle_s()) is not None
    print(f"bytes came {time.monotonic() - failed_s:.1f} s after their write had failed")
