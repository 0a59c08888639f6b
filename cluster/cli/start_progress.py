"""Progress of a start in the terminal: one updating line per member, or plain lines in a pipe."""

import contextlib
import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

_READY = "ready"


class StartProgress:
    """Shows stages until its context ends; ``line`` prints around it. Thread-safe."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._began_s = time.monotonic()
        self._stages: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()
        self._live = Live(console=self._console, get_renderable=self._table, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: TracebackType | type[BaseException] | BaseException | None) -> None:
        self.finish()

    def finish(self) -> None:
        """Stop updating lines; later stages are printed as plain lines. Safe to call twice."""
        self._live.stop()

    def stage(self, member: str, stage: str) -> None:
        """Report that a member has reached a stage."""
        now_s = time.monotonic() - self._began_s
        with self._lock:
            self._stages[member] = (stage, now_s)
        if not self._live.is_started:
            self.line(f"{now_s:5.1f} s  {member}: {stage}")

    def line(self, text: str) -> None:
        """Print one line for the user."""
        with contextlib.suppress(OSError):  # the terminal may be gone; the cluster still has to shut down
            self._console.print(text, markup=False)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        with self._lock:
            stages = dict(self._stages)
        for member, (stage, at_s) in stages.items():
            mark = "[green]✓[/]" if stage == _READY else Spinner("dots")
            table.add_row(mark, member, stage, f"{at_s:.1f} s")
        return table
