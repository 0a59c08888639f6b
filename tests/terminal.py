"""Command on its own terminal, as a person runs it: read its output, press keys, wait for its end."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.readme import ROOT

_ON_THE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""

_CONTROL = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z])")
_UP, _ERASE = "\x1b[1A", "\x1b[2K"
LAST_LINES = 40


class Terminal:
    """Command in a folder, by default the repository's root. Leaving the context kills what still runs on it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None, folder: Path = ROOT) -> None:
        self._fd, inside = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ON_THE_TERMINAL, *command],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            cwd=folder,
            env=os.environ | (env or {}),
            start_new_session=True,
        )
        os.close(inside)
        self._output = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def output(self) -> str:
        """Return all output so far, including colors and cursor movements."""
        return self._output.decode(errors="replace")

    @property
    def screen(self) -> str:
        """Return the last lines as a person sees them, without colors and erased text."""
        lines = [""]
        for piece in _CONTROL.split(self.output.replace("\r", "")):
            if piece == _UP:
                lines = lines[:-1] or [""]
            elif piece == _ERASE:
                lines[-1] = ""
            elif not _CONTROL.fullmatch(piece):
                first, *more = piece.split("\n")
                lines = [*lines[:-1], lines[-1] + first, *more]
        return "\n".join(lines[-LAST_LINES:])

    @property
    def pid(self) -> int:
        """Return the process id of the command, which is also its process group."""
        return self._process.pid

    def press(self, keys: bytes) -> None:
        """Press keys. ``b"\x03"`` is Ctrl-C."""
        os.write(self._fd, keys)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait for a condition. Raise AssertionError with the output if time runs out or the command has ended."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            has_ended = not self._reader.is_alive()
            # Its last output may have arrived in the meantime.
            assert not has_ended or condition(), f"the command has ended:\n{self.screen}"
            assert time.monotonic() < deadline_s, f"not within {timeout_s} s:\n{self.screen}"
            time.sleep(0.05)

    def wait(self, timeout_s: float) -> int:
        """Return the exit code once the command has ended, or -n if signal n ended it."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.screen}") from None

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(os.tcgetpgrp(self._fd), signal.SIGKILL)
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=10)
        os.close(self._fd)

    def _read(self) -> None:
        # A pseudo-terminal reports its end as an error.
        with contextlib.suppress(OSError):
            while piece := os.read(self._fd, 4096):
                self._output += piece
