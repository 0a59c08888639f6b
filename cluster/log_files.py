"""Log files of a cluster's processes: on every machine, one folder for each start of the cluster.

``baton logs`` shows them while the cluster runs and after it has stopped.
"""

import faulthandler
import os
import shutil
import sys
import time
from dataclasses import dataclass
from logging import LogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path

from cluster.spec.env import CACHE_DIR

KEPT_SESSIONS = 5
"""Number of a cluster's folders that are kept, including the newest."""
MAX_FILE_BYTES = 32 << 20
"""Size at which a file is renamed to ``.log.1``, which replaces the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSession:
    """Folder of the log files of one start of a cluster. Its path can differ between machines."""

    cluster: str
    name: str

    @classmethod
    def new(cls, cluster: str) -> "LogSession":
        return cls(cluster=cluster, name=f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{os.getpid()}")

    @property
    def folder(self) -> Path:
        return _root() / self.cluster / self.name


def sessions_of(cluster: str) -> list[Path]:
    """Return the folders of a cluster's sessions on this machine, from the newest to the oldest."""
    return sorted((session for session in _root().glob("*/*") if session.parent.name == cluster), reverse=True)


def cluster_names() -> list[str]:
    """Return the names of the clusters with logs on this machine. The one that was started last comes first."""
    newest = sorted(_root().glob("*/*"), key=lambda session: session.name, reverse=True)
    return list(dict.fromkeys(session.parent.name for session in newest))


def _root() -> Path:
    return CACHE_DIR.get() / "logs"


def log_name(process: str) -> str:
    """Return the file name of a process such as ``prefill-0 rank 1``."""
    return f"{process.replace(' ', '-')}.log"


class _LogFile(RotatingFileHandler):
    """Log file that says once, on standard error, that it cannot be written."""

    _has_failed = False

    def handleError(self, record: LogRecord) -> None:  # noqa: N802
        """Override the method of ``logging.Handler``, which prints a traceback for every line of a full disk."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            sys.stderr.write(f"{self.baseFilename}: log lines are lost: {error.strerror or error}\n")


def open_log(session: LogSession, process: str) -> RotatingFileHandler | None:
    """Open the log file of a process, which also gets the stacks of a crash. Remove folders of old sessions.

    Returns None, with a line on standard error, if the file cannot be written.
    """
    path = session.folder / log_name(process)
    try:
        _make_folder(session)
        handler = _LogFile(path, maxBytes=MAX_FILE_BYTES, backupCount=1, encoding="utf-8")
        # A descriptor of its own, because the handler closes its own when the file is full.
        faulthandler.enable(os.open(path, os.O_WRONLY | os.O_APPEND))
    except OSError as error:
        sys.stderr.write(f"{process}: no log file in {session.folder}: {error.strerror or error}\n")
        return None
    return handler


def _make_folder(session: LogSession) -> None:
    folder = session.folder
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return
    # The clock that names folders may have been set back, so that older starts have later names.
    others = [other for other in sessions_of(session.cluster) if other != folder]
    for old in others[KEPT_SESSIONS - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
