"""Ctrl-C at a terminal ends `make` with the exit code of its command."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.readme import ROOT
from tests.terminal import Terminal

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("code", [0, 3])
def test_ctrl_c_at_a_terminal_ends_make_with_the_commands_code(tmp_path: Path, code: int) -> None:
    server = tmp_path / "server.py"
    server.write_text(
        "import signal, sys\n"
        f"signal.signal(signal.SIGINT, lambda *_: (print('drained', flush=True), sys.exit({code})))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    makefile = tmp_path / "Makefile"
    python = shlex.quote(sys.executable)
    makefile.write_text(f"serve:\n\t@exec {python} -m cluster.cli.foreground {python} {server}\n")
    with Terminal(["make", "--silent", "-f", str(makefile), "serve"]) as terminal:
        terminal.wait_until(lambda: "ready" in terminal.output, 30)
        terminal.press(b"\x03")
        # make reports any failure of a recipe as 2
        assert terminal.wait(30) == (2 if code else 0)
        assert "drained" in terminal.output


def test_without_a_terminal_the_command_replaces_the_launcher() -> None:
    command = [sys.executable, "-m", "cluster.cli.foreground", "sh", "-c", "echo $$; exit 7"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=ROOT) as process:
        output, _ = process.communicate(timeout=120)
    assert (int(output), process.returncode) == (process.pid, 7)
