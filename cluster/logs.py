"""Log format of all processes: text or JSON lines, which never contain a prompt, an answer or a key."""

import datetime
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from cluster.log_files import LogSession, open_log
from cluster.spec.config import LogConfig, LogFormat

_FACTS = "facts"
_encoder = msgspec.json.Encoder(enc_hook=str)


def with_facts(**facts: Any) -> dict[str, Mapping[str, Any]]:
    """Return the ``extra`` of a log call: searchable fields, without those that are None."""
    return {_FACTS: {name: value for name, value in facts.items() if value is not None}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLog:
    """Log of one process."""

    process: str
    """Name in records and of the file, such as ``prefill-0 rank 1``."""
    config: LogConfig
    session: LogSession | None = None
    """Session whose folder gets a log file. None for no file."""


def set_up_logs(log: ProcessLog, *, to_stderr: bool = True) -> None:
    """Send this process's log records to its file and to standard error."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)] if to_stderr else []
    if log.session is not None and (file := open_log(log.session, log.process)) is not None:
        handlers.append(file)
    for handler in handlers:
        is_json = log.config.format is LogFormat.JSON
        handler.setFormatter(JsonLines(log.process) if is_json else TextLines(log.process))
    root = logging.getLogger()
    root.handlers[:] = handlers
    root.setLevel(logging.INFO)
    for library in ("httpx", "httpcore", "uvicorn", "opentelemetry", "asyncio"):
        logging.getLogger(library).setLevel(logging.WARNING)


class JsonLines(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return one line with time, level, process, logger, message, fields, and the traceback of an error."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "process": self._process, "logger": record.name}
        line |= {"message": record.getMessage(), **_facts(record)}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _encoder.encode(line).decode()


class TextLines(logging.Formatter):
    """Formats each record as text, with its fields as name=value after the message."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process.replace('%', '%%')}: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        facts = (f"{name}={value}" for name, value in _facts(record).items())
        return " ".join([super().formatMessage(record), *facts])


def _facts(record: logging.LogRecord) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = getattr(record, _FACTS, {})
    return facts
