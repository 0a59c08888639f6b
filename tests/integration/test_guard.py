"""The guard process, which ends the processes of a killed driver."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.processes import GONE, Guard

pytestmark = pytest.mark.integration


def in_session() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "600"], start_new_session=True)


@pytest.mark.parametrize("sign", [None, signal.SIGSTOP, signal.SIGKILL])
def test_an_orderly_exit_needs_no_guard(sign: signal.Signals | None, tmp_path: Path) -> None:
    folder = tmp_path / "ray"
    folder.mkdir()
    guard, daemon = Guard(folder), in_session()
    guard.watch(daemon.pid)
    if sign is not None:
        os.kill(guard._process.pid, sign)
    guard.finish(10.0)
    assert daemon.wait(10.0) == -signal.SIGKILL
    assert guard._process.returncode == -signal.SIGKILL
    assert not folder.exists()


def test_a_file_in_the_current_folder_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cluster.py").write_text("open('imported', 'w')")
    monkeypatch.chdir(tmp_path)
    guard, daemon = Guard(Path("ray")), in_session()
    guard.watch(daemon.pid)
    assert guard._process.stdin is not None
    guard._process.stdin.close()  # as if the driver had been killed
    assert guard._process.wait(30.0) == 0
    assert daemon.wait(10.0) == -signal.SIGKILL
    assert not Path("imported").exists()


def test_a_killed_driver_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "ray"
    folder.mkdir()
    daemon = in_session()
    script = f"import os, signal, pathlib; from cluster.processes import Guard; Guard(pathlib.Path({str(folder)!r}))"
    script += f".watch({daemon.pid}); os.kill(os.getpid(), signal.SIGKILL)"
    ended = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, timeout=60.0)
    assert GONE in ended.stderr
    assert daemon.wait(60.0) == -signal.SIGKILL
    for _ in range(100):
        if not folder.exists():
            return
        time.sleep(0.1)
    pytest.fail(f"{folder} is still there")
