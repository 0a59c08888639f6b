"""Shows the table of what was done and seen when the session ends."""

import pytest

from tests.chaos.report import LINES, as_table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if LINES:
        terminalreporter.section("chaos")
        terminalreporter.write_line(as_table(LINES))
