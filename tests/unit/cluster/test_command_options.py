"""Options of operator commands."""

import pytest
from typer.testing import CliRunner

from cluster.cli import commands
from cluster.cli.app import app
from cluster.supervisor.commands import OperatorCommand


@pytest.mark.parametrize(
    "arguments",
    [
        ["drain", "decode-0", "--grace", "inf"],
        ["restart", "--grace", "inf"],
        ["scale", "decode=2", "--grace", "inf"],
        ["scale", "decode=2", "--wait", "inf"],
        ["scale", "decode=2", "--wait", "nan"],
    ],
)
def test_a_wait_that_the_driver_cannot_read_is_refused(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    given: list[OperatorCommand] = []
    monkeypatch.setattr(commands, "_give", lambda _, command: given.append(command))
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, given) == (2, [])
    assert arguments[-2] in result.output
