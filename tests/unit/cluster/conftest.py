"""The command line, called in the process of the tests."""

from collections.abc import Callable

import pytest

from cluster.cli.main import main

RunBaton = Callable[..., tuple[int, str, str]]


@pytest.fixture
def baton(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunBaton:
    """Run the command line. Return exit code, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["baton", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        code = caught.value.code
        return code if isinstance(code, int) else 0, captured.out, captured.err

    return run
