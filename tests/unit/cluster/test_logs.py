"""Log records: one JSON object per line, or text for people."""

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from cluster.logs import JsonLines, ProcessLog, TextLines, set_up_logs, with_facts
from cluster.spec.config import LogConfig, LogFormat


def record(message: str, *args: object, **facts: object) -> logging.LogRecord:
    made = logging.LogRecord("router.relay", logging.WARNING, "file", 1, message, args, None)
    made.__dict__.update(with_facts(**facts))
    return made


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    handlers, level = [*logger.handlers], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_an_object_has_the_known_fields_only() -> None:
    line = json.loads(JsonLines("router-1").format(record("a %s failed", "leg", room=2**62, replica=None)))
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning",
        "process": "router-1",
        "logger": "router.relay",
        "message": "a leg failed",
        "room": 2**62,
    }


def test_an_error_is_in_the_same_line() -> None:
    made = record("it broke")
    try:
        raise ValueError("no\nroom")
    except ValueError:
        made.exc_info = sys.exc_info()
    text = JsonLines("router").format(made)
    assert "\n" not in text
    assert json.loads(text)["error"].endswith("ValueError: no\nroom")


def test_text_records_have_the_fields_after_the_message() -> None:
    text = TextLines("decode-0 rank 0").format(record("100 % done", room=7))
    assert text.endswith("WARNING decode-0 rank 0: 100 % done room=7")


@pytest.mark.parametrize("form", LogFormat)
def test_records_are_written_to_standard_error(
    form: LogFormat, root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log = ProcessLog(process="router", config=LogConfig(format=form))
    set_up_logs(log)
    set_up_logs(log)
    logging.getLogger("router.anything").info("hello", extra=with_facts(room=1))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("{") == (form is LogFormat.JSON)
    assert "hello" in line
    assert len(root.handlers) == 1
