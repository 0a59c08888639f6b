"""Ends what a killed driver could not: a small process of its own that outlives the driver by a few seconds.

It reads the driver's end of a pipe. When that ends without a good word, the driver is gone, however it went.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from cluster.processes import kill_sessions, living_in

GRACE_S = 3.0
"""Time for the processes to notice by themselves that the driver has gone."""
_KILL_S = 10.0
_DISMISS = "dismiss"


class Guard:
    """The driver's hold on its guard."""

    def __init__(self, folder: Path) -> None:
        """Start guarding; ``folder`` goes together with the processes."""
        self._folder = folder
        self._sessions: list[int] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.guard", str(folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def watch(self, session: int) -> None:
        """The processes of this session shall not outlive the driver."""
        self._sessions.append(session)
        self._say(str(session))

    def finish(self, timeout_s: float) -> None:
        """Kill what is left and remove the folder: the driver ends in order, and does itself what the guard would."""
        kill_sessions(self._sessions, timeout_s)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._say(_DISMISS)
        self._process.communicate()

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        try:
            print(word, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return  # somebody killed the guard; the driver goes on without


def main() -> None:
    """Wait for the driver's end, then kill the sessions that it named."""
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
