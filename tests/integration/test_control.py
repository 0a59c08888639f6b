"""The driver's control socket: for its owner only, in any folder, and immune to invalid commands."""

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cli.control import send_command, serve_commands
from cluster.spec.errors import PeerUnreachableError
from cluster.supervisor.commands import OperatorCommand, ScaleCommand
from cluster.supervisor.events import CommandAnswer, Outcome

pytestmark = pytest.mark.integration

ORDER = ScaleCommand(prefill=2, grace_s=1.5)
ANSWERS = [CommandAnswer(7, "on the way", Outcome.GOING_ON), CommandAnswer(7, "prefill: 2", Outcome.DONE)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a path that is longer than a socket's address may be."""
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    return folder / "baton.sock"


def test_a_command_arrives_and_its_answers_return(path: Path) -> None:
    given: list[OperatorCommand] = []

    def give(command: OperatorCommand) -> Iterator[CommandAnswer]:
        given.append(command)
        yield from ANSWERS

    path.touch()  # left by a killed driver
    with serve_commands(path, give):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert list(send_command(path, ORDER)) == ANSWERS
    assert given == [ORDER]
    assert not path.exists()


@pytest.mark.parametrize("line", [b"", b"{}\n", b'{"type":"Evil"}\n', b"\xff\xfe\n", b"x" * 65_536])
def test_invalid_commands_are_refused_without_harm(path: Path, line: bytes) -> None:
    with serve_commands(path, lambda _: iter(ANSWERS)):
        folder = os.open(path.parent, os.O_PATH)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"/proc/self/fd/{folder}/{path.name}")
            connection.sendall(line)
            if len(line) < 65_536:  # the longest line that is read, without waiting for its rest
                connection.shutdown(socket.SHUT_WR)
            assert b"invalid command" in connection.recv(4096)
        os.close(folder)
        assert list(send_command(path, ORDER)) == ANSWERS


def test_a_missing_or_ending_driver_is_reported_in_one_line(path: Path) -> None:
    with pytest.raises(PeerUnreachableError, match=r"does not respond at .*No such file or directory"):
        list(send_command(path, ORDER))
    with (
        serve_commands(path, lambda _: iter(ANSWERS[:1])),
        pytest.raises(PeerUnreachableError, match=r"^the driver ended before the command was carried out$"),
    ):
        list(send_command(path, ORDER))
