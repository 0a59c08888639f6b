"""Files that describe the clusters running on this machine, one per cluster and readable only by its owner."""

import fcntl
import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec

from cluster.processes import ProcessId, is_alive
from cluster.spec.errors import UserError

_log = logging.getLogger(__name__)

_ALLOWED = "set XDG_RUNTIME_DIR to a folder that you own"
_DEFAULT_URL = "http://127.0.0.1:8000"


class RunningCluster(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    process: ProcessId
    model: str
    router_url: str | None = None
    """None until the router is ready."""
    bootstrap_url: str | None = None
    """None until the bootstrap service is ready."""
    logs: str
    """Folder of the log files of this start."""
    token: str
    """Bearer token of the bootstrap service."""
    ray_environ: dict[str, str] = {}
    """Environment variables with which Ray's own tools reach the cluster. Empty until Ray is ready."""
    ray_dashboard: str = ""
    """Address of Ray's dashboard; empty if it has none."""


class Note:
    """File that describes this driver's cluster, as a context manager that removes it at exit."""

    def __init__(self, cluster: RunningCluster) -> None:
        """Create the note.

        Raises:
            UserError: a cluster with this name is already running.
        """
        self._path = _folder() / f"{cluster.name}.json"
        self.cluster = cluster
        self._lock = threading.Lock()
        with _locked(self._path.parent):
            if (other := _read(self._path)) is not None:
                raise UserError(
                    f"a cluster named {other.name!r} is already running (process {other.process.pid}); "
                    f"stop it with `baton down --cluster {other.name}`, or give this one another name"
                )
            try:
                self._write(cluster)
            except OSError as error:
                raise _unusable(self._path, error) from error

    def update(self, **changes: str | dict[str, str]) -> None:
        with self._lock:
            self.cluster = msgspec.structs.replace(self.cluster, **changes)
            try:
                self._write(self.cluster)
            except OSError as error:  # the cluster runs without it
                _log.warning("%s", _unusable(self._path, error))

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _write(self, cluster: RunningCluster) -> None:
        """Write the note to a temporary file first, so that no reader sees a partial note."""
        fresh = self._path.with_suffix(f".{os.getpid()}")
        try:
            fresh.touch(mode=0o600)
            fresh.write_bytes(msgspec.json.encode(cluster))
            fresh.replace(self._path)
        finally:
            fresh.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let only one process at a time claim a name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def control_path(name: str) -> Path:
    return _folder() / f"{name}.sock"


def running_clusters() -> list[RunningCluster]:
    """Return the clusters of this account that are running on this machine."""
    return [cluster for path in sorted(_folder().glob("*.json")) if (cluster := _read(path))]


def find_running(name: str | None) -> RunningCluster:
    """Return the cluster with this name, or the only running one if no name is given.

    Raises:
        UserError: no such cluster is running, or several are and no name is given.
    """
    found = {cluster.name: cluster for cluster in running_clusters()}
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if name is not None and name in found:
        return found[name]
    if not found:
        raise UserError("no cluster that you started is running on this machine")
    given = "no name" if name is None else repr(name)
    raise UserError(f"--cluster: got {given}; allowed: {', '.join(sorted(found))}")


def endpoint_url(url: str | None, name: str | None) -> str:
    """Return the given base URL without `/v1`, otherwise that of a running cluster, otherwise the default one.

    Raises:
        UserError: both are given, no such cluster is running, several are and no name is given, or it is starting.
    """
    if url is not None:
        if name is not None:
            raise UserError("got both --url and --cluster; allowed: one of them")
        return url.rstrip("/").removesuffix("/v1")
    if name is None and not running_clusters():
        return _DEFAULT_URL
    cluster = find_running(name)
    if cluster.router_url is None:
        raise UserError(f"{cluster.name} is still starting; `baton status` shows its state")
    return cluster.router_url


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime, "baton") if runtime else Path(tempfile.gettempdir(), f"baton-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_ours = folder.stat().st_uid == os.getuid() and not folder.is_symlink()
    except OSError as error:
        raise _unusable(folder, error) from error
    if not is_ours:
        raise UserError(f"{folder} belongs to another user; {_ALLOWED}")
    return folder


def _unusable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: {error.strerror}; {_ALLOWED}")


def _read(path: Path) -> RunningCluster | None:
    try:
        cluster = msgspec.json.decode(path.read_bytes(), type=RunningCluster)
    except (OSError, msgspec.DecodeError):
        return None
    return cluster if is_alive(cluster.process) else None
