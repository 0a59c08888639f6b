"""Control socket of the driver, next to its note: commands in, responses out, one JSON object per line, for its owner
only.
"""

import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from cluster.spec.errors import PeerUnreachableError
from cluster.supervisor.commands import Command
from cluster.supervisor.events import Answer, Outcome

_MAX_LINE_BYTES = 65_536

Give = Callable[[Command], Iterator[Answer]]

_commands: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_answers = msgspec.json.Decoder(Answer)


@contextmanager
def serve_commands(path: Path, give: Give) -> Iterator[None]:
    """Accept commands at a path until the context ends; a socket left behind by a killed driver is removed."""
    path.unlink(missing_ok=True)
    with _reachable(path) as short, _Server(str(short), _Connection) as server:
        path.chmod(0o600)
        server.give = give
        thread = threading.Thread(target=server.serve_forever, name="commands", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            path.unlink(missing_ok=True)


def send_command(path: Path, command: Command) -> Iterator[Answer]:
    """Have a driver carry out a command; yields its responses as they arrive, up to the last one.

    Raises:
        PeerUnreachableError: nothing listens there, or the driver ended before its last response.
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


def decode_command(line: bytes) -> Command | None:
    """Parse the command in a line; None if it is invalid."""
    try:
        return _commands.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False
    """A command may outlast the cluster's end, which is its last response."""
    give: Give


class _Connection(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        command = decode_command(self.rfile.readline(_MAX_LINE_BYTES))
        if command is None:
            self._tell(Answer(0, "not a command", Outcome.REFUSED))
            return
        for answer in self.server.give(command):
            with suppress(OSError):  # the client is gone; the command goes on
                self._tell(answer)

    def _tell(self, answer: Answer) -> None:
        self.wfile.write(msgspec.json.encode(answer) + b"\n")


@contextmanager
def _reachable(path: Path) -> Iterator[Path]:
    """Yield an alias of the path that is short enough for a socket's address (107 bytes), wherever the folder is."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{folder}", path.name)
    finally:
        os.close(folder)
