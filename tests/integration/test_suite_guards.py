"""What watches the suite finds leftovers, and Ctrl-C at a terminal ends `make` with the server's code."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import leftovers
from tests.readme import ROOT
from tests.terminal import Terminal

pytestmark = pytest.mark.integration


def test_a_process_that_left_its_parent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "GRACE_S", 0.0)
    before = leftovers.Before.now()
    script = "import subprocess; print(subprocess.Popen(['sleep', '63'], start_new_session=True, stdout=-3).pid)"
    pid = int(subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True).stdout)
    try:
        # The kernel shows what a process runs a moment after it runs.
        deadline_s = time.monotonic() + 60
        while not Path(f"/proc/{pid}/cmdline").read_bytes() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert f"process {pid}: sleep 63" in leftovers.find_leftovers(before)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_file_in_shared_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "GRACE_S", 0.0)
    before = leftovers.Before.now()
    path = Path(f"/dev/shm/baton-left-behind-{os.getpid()}")
    path.touch()
    try:
        assert f"file {path}" in leftovers.find_leftovers(before)
    finally:
        path.unlink()


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
    makefile.write_text(f"serve:\n\t@exec {sys.executable} -m cluster.cli.foreground {sys.executable} {server}\n")
    with Terminal(["make", "--silent", "-f", str(makefile), "serve"]) as terminal:
        terminal.wait_until(lambda: "ready" in terminal.output, 30)
        terminal.press(b"\x03")
        # make answers a recipe's failure with 2, whatever the recipe's code was.
        assert terminal.wait(30) == (2 if code else 0)
        assert "drained" in terminal.output


def test_without_a_terminal_the_command_takes_the_place_of_the_launcher() -> None:
    command = [sys.executable, "-m", "cluster.cli.foreground", "sh", "-c", "echo $$; exit 7"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=ROOT) as process:
        output, _ = process.communicate(timeout=120)
    assert (int(output), process.returncode) == (process.pid, 7)
