"""Control socket of the driver, for its owner only: commands and answers, one JSON object per line."""

import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from cluster.spec.errors import PeerUnreachableError
from cluster.supervisor.commands import OperatorCommand
from cluster.supervisor.events import CommandAnswer, Outcome

_MAX_LINE_BYTES = 65_536

Give = Callable[[OperatorCommand], Iterator[CommandAnswer]]

_commands: msgspec.json.Decoder[OperatorCommand] = msgspec.json.Decoder(OperatorCommand)
_answers = msgspec.json.Decoder(CommandAnswer)


@contextmanager
def serve_commands(path: Path, give: Give) -> Iterator[None]:
    """Accept commands at a path until the context ends."""
    # A killed driver leaves its socket behind.
    path.unlink(missing_ok=True)
    with _reachable(path) as short, _Server(str(short), _Connection) as server:
        path.chmod(0o600)
        server.give = give
        threading.Thread(target=server.serve_forever, name="commands", daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
            path.unlink(missing_ok=True)


def send_command(path: Path, command: OperatorCommand) -> Iterator[CommandAnswer]:
    """Send a command to a driver and yield its answers as they arrive.

    Raises:
        PeerUnreachableError: nothing is listening at the path, or the driver ended before its last answer.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            with _reachable(path) as short:
                connection.connect(str(short))
            connection.sendall(msgspec.json.encode(command) + b"\n")
            for line in connection.makefile("rb"):
                answer = _answers.decode(line)
                yield answer
                if answer.outcome is not Outcome.GOING_ON:
                    return
        except OSError as error:
            raise PeerUnreachableError(f"the driver does not respond at {path}: {error.strerror}") from error
    raise PeerUnreachableError("the driver ended before the command was carried out")


def decode_command(line: bytes) -> OperatorCommand | None:
    try:
        return _commands.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False
    """False, so that closing does not wait for commands, whose last answer may be that the cluster is stopping."""
    give: Give


class _Connection(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        command = decode_command(self.rfile.readline(_MAX_LINE_BYTES))
        if command is None:
            self._send(CommandAnswer(0, "invalid command", Outcome.REFUSED))
            return
        for answer in self.server.give(command):
            with suppress(OSError):  # the client has disconnected, but the command continues
                self._send(answer)

    def _send(self, answer: CommandAnswer) -> None:
        self.wfile.write(msgspec.json.encode(answer) + b"\n")


@contextmanager
def _reachable(path: Path) -> Iterator[Path]:
    """Yield an alias of the path that fits into a socket address (107 bytes)."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{folder}", path.name)
    finally:
        os.close(folder)
