"""Table at the end of a session, a line for each client."""

import pytest

from tests.clients.table import ROWS, as_table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ROWS:
        terminalreporter.section("clients")
        terminalreporter.line(as_table(ROWS))
