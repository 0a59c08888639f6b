"""How processes write what happens: lines for people, or one JSON object a line. Never a prompt, an answer or a key."""

import datetime
import logging
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from cluster.spec.log_config import LogConfig, LogFormat

_FACTS = "facts"
_encoder = msgspec.json.Encoder(enc_hook=str)


def with_facts(**facts: Any) -> dict[str, Mapping[str, Any]]:
    """For ``extra`` of a log call: what a reader may want to search by; None for what is not known."""
    return {_FACTS: {name: value for name, value in facts.items() if value is not None}}


def set_up_logs(config: LogConfig, process: str) -> None:
    """From now on this process writes its records to standard error, under this name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process) if config.format is LogFormat.JSON else TextLines(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for library in ("httpx", "httpcore", "uvicorn", "opentelemetry", "asyncio"):
        logging.getLogger(library).setLevel(logging.WARNING)


class JsonLines(logging.Formatter):
    """One object a line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, process, logger and message, then the facts, then the traceback of an error."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "process": self._process, "logger": record.name}
        line |= {"message": record.getMessage(), **_facts(record)}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _encoder.encode(line).decode()


class TextLines(logging.Formatter):
    """The same for people: what an object has behind the message, as name=value."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process.replace('%', '%%')}: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line without a traceback."""
        facts = (f"{name}={value}" for name, value in _facts(record).items())
        return " ".join([super().formatMessage(record), *facts])


def _facts(record: logging.LogRecord) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = getattr(record, _FACTS, {})
    return facts
