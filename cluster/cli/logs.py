"""`baton logs`: show the log files of a cluster's processes on this machine."""

import heapq
import os
import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.commands import Cluster
from cluster.cli.running import RunningCluster, find_running, running_clusters
from cluster.log_files import cluster_names, sessions_of
from cluster.processes import is_alive
from cluster.spec.errors import UserError

_LOOK_S = 0.2
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]\d{3}")
_FILE = re.compile(r"(?P<member>.+?)(?:-rank-(?P<rank>\d+))?\.log")


def logs(
    process: Annotated[
        str | None,
        typer.Argument(
            help="Replica (prefill-0), rank (prefill-0/1), router, bootstrap or driver. Default: all.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the cluster stops.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of last lines to print.")] = 200,
    previous: Annotated[bool, typer.Option("--previous", "-p", help="Show the start before the last one.")] = False,
    name: Cluster = None,
) -> None:
    """Show the logs of a cluster on this machine: the one that runs, or else the one that was started last."""
    running, folder = _find(name, previous=previous)
    tails = Tails(folder, process)
    for line in tails.last(lines):
        typer.echo(line)
    with suppress(KeyboardInterrupt):
        while follow and running is not None:
            is_over = not is_alive(running.process)
            for line in tails.new():
                typer.echo(line)
            if is_over:
                return
            time.sleep(_LOOK_S)


def _find(name: str | None, *, previous: bool) -> tuple[RunningCluster | None, Path]:
    """Return the cluster if it is running, and the folder of its logs."""
    names = [cluster.name for cluster in running_clusters()]
    running = find_running(name) if name in names or (name is None and names) else None
    if running is not None and not previous:
        return running, Path(running.logs)
    cluster = running.name if running is not None else name or next(iter(cluster_names()), None)
    sessions = sessions_of(cluster)[int(previous) :] if cluster is not None else []
    if not sessions:
        known = ", ".join(cluster_names()) or "none yet"
        raise UserError(f"no {'earlier ' * previous}logs of {cluster or 'any cluster'} on this machine; known: {known}")
    return None, sessions[0]


class Tails:
    """Last lines of the log files in a folder, by time, and the lines that are added later."""

    def __init__(self, folder: Path, process: str | None) -> None:
        """Select the files of a process, of all ranks of a replica, or all files.

        Raises:
            UserError: there is no such file.
        """
        self._folder, self._process = folder, process
        self._positions: dict[Path, dict[int, int]] = {}
        """Numbers of bytes read, by inode."""
        if not self._paths():
            known = ", ".join(dict.fromkeys(_names(path)[0] for path in sorted(folder.glob("*.log")))) or "no process"
            given = f"no log of {process!r}" if process else "no logs"
            others = "Processes on other machines log on those."
            raise UserError(f"{folder}: {given}; allowed: {known}. {others}")

    def last(self, count: int) -> list[str]:
        """Return the last lines of all selected files."""
        return list(deque(self.new(), count))

    def new(self) -> Iterator[str]:
        """Yield the complete lines that were added since the last call."""
        return (line for _, line in heapq.merge(*(_stamped(self._lines(path)) for path in self._paths())))

    def _paths(self) -> list[Path]:
        return [path for path in sorted(self._folder.glob("*.log")) if self._process in (None, *_names(path))]

    def _lines(self, path: Path) -> Iterator[str]:
        """Yield the unread complete lines of a file, after those of the full file that it has replaced."""
        positions, reached = self._positions.get(path, {}), dict[int, int]()
        with ExitStack() as stack, suppress(FileNotFoundError):
            parts = [stack.enter_context(path.open("rb"))]
            with suppress(FileNotFoundError):
                parts.insert(0, stack.enter_context(path.with_name(f"{path.name}.1").open("rb")))
            for part in parts:
                status = os.fstat(part.fileno())
                if status.st_ino in reached:  # renamed between both openings
                    continue
                position = positions.get(status.st_ino, 0)
                position = part.seek(position if position <= status.st_size else 0)
                while (line := part.readline()).endswith(b"\n"):
                    position += len(line)
                    yield line.decode(errors="replace").removesuffix("\n")
                reached[status.st_ino] = position
            self._positions[path] = reached


def _names(path: Path) -> tuple[str, str]:
    """Return the names that select a file: of the replica or service, and of the rank."""
    parts = _FILE.fullmatch(path.name)
    assert parts is not None, path
    member, rank = parts["member"], parts["rank"]
    return member, member if rank is None else f"{member}/{rank}"


def _stamped(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Yield each line after its time. Lines without one, such as tracebacks, follow the line before."""
    stamp = ""
    for line in lines:
        if found := _TIME.search(line[:64]):
            stamp = found[0]
        yield stamp, line
