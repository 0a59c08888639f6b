"""Cleans up after a killed driver, from a small process that outlives the driver by a few seconds.

The guard reads from a pipe whose other end the driver holds. If the pipe closes without a farewell, the driver has
died.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from cluster.processes import kill_sessions, living_in

GRACE_S = 3.0
"""Time for processes to notice by themselves that the driver has gone."""
_KILL_S = 10.0
_DISMISS = "dismiss"


class Guard:
    """Driver's handle of its guard."""

    def __init__(self, folder: Path) -> None:
        """Start guarding; ``folder`` is removed together with the processes."""
        self._folder = folder
        self._sessions: list[int] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.guard", str(folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def watch(self, session: int) -> None:
        """Add a session whose processes must not outlive the driver."""
        self._sessions.append(session)
        self._say(str(session))

    def finish(self, timeout_s: float) -> None:
        """Kill what is left and remove the folder: on an orderly exit the driver does the guard's work itself."""
        kill_sessions(self._sessions, timeout_s)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._say(_DISMISS)
        self._process.communicate()

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        try:
            print(word, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return  # the guard was killed; the driver goes on without it


def main() -> None:
    """Wait for the driver's end, then kill the sessions that it registered."""
    sessions = []
    for line in sys.stdin:
        if line.strip() == _DISMISS:
            return
        sessions.append(int(line))
    deadline_s = time.monotonic() + GRACE_S
    while living_in(sessions) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    kill_sessions(sessions, _KILL_S)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
