"""Command-line tools of clients, run in a folder of their own."""

import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 240
LAST_LINES = 15


def run_tool(folder: Path, name: str, *arguments: str, **env: str) -> None:
    """Run a program that lies next to this Python. Raise RuntimeError with its last lines if it fails."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name(name)), *arguments],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder)} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode != 0:
        lines = done.stdout.splitlines()[-LAST_LINES:]
        raise RuntimeError("\n".join([*lines, f"{name} exited with {done.returncode}"]))
