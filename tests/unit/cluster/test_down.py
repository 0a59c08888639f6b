"""What `baton down` refuses before it looks for a cluster."""

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app


@pytest.mark.parametrize("given", ["-3", "nan", "soon"])
def test_a_wait_that_is_no_time_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.cli.running.find_running", lambda name: pytest.fail(f"looked for {name}"))
    result = CliRunner().invoke(app, ["down", "--timeout", given])
    assert result.exit_code == 2
    assert "--timeout" in result.output
