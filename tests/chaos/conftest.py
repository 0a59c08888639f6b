"""The folder where faults are ordered, and the table of what was done and seen when the session ends."""

from pathlib import Path

import pytest

from tests.chaos.report import LINES, as_table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a module orders its faults."""
    return tmp_path_factory.mktemp("faults")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if LINES:
        terminalreporter.section("chaos")
        terminalreporter.write_line(as_table(LINES))
