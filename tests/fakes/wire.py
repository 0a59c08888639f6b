"""Transport of a server's connection without a socket."""

import asyncio
from typing import Any


class ClosedSocket:
    def fileno(self) -> int:
        raise OSError("closed")

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 2


class Wire(asyncio.Transport):
    """Transport that records what is written and done."""

    def __init__(self) -> None:
        super().__init__({"socket": ClosedSocket()})
        self.written: list[bytes] = []
        self.is_closed = self.is_aborted = False
        self.has_eof = False
        self.is_paused = False

    @property
    def text(self) -> str:
        """Return all that was written."""
        return b"".join(self.written).decode()

    def write(self, data: Any) -> None:
        assert not self.is_closed
        assert not self.has_eof
        self.written.append(bytes(data))

    def write_eof(self) -> None:
        self.has_eof = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Accept any limits, because nothing is buffered."""

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True
