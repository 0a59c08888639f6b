"""Folder in which faults are requested, and the table of results at the end of the session."""

from pathlib import Path

import pytest

from tests.chaos.report import LINES, as_table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which a module requests its faults."""
    return tmp_path_factory.mktemp("faults")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if LINES:
        terminalreporter.section("chaos")
        terminalreporter.write_line(as_table(LINES))
