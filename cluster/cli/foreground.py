"""Runner of a command in the terminal's foreground process group, so that Ctrl-C does not reach the calling `make`.

`make` fails whenever it is interrupted itself. Otherwise it ends with the command's exit code.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

_STDIN = 0


def main() -> None:
    """Run the command in the arguments; exit with its exit code, or 128 plus the number of the signal that ended it."""
    command = sys.argv[1:]
    if not command:
        sys.exit("usage: python -m cluster.cli.foreground COMMAND [ARGUMENT...]")
    if not _is_foreground():
        os.execvp(command[0], command)
    code = _run_in_foreground(command)
    sys.exit(code if code >= 0 else 128 - code)


def _is_foreground() -> bool:
    try:
        return os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:
        return False


def _run_in_foreground(command: Sequence[str]) -> int:
    # If Ctrl-Z stopped only the command, make would wait and the shell would show no prompt.
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    child = subprocess.Popen(command, process_group=0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: child.send_signal(received))
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(_STDIN, child.pid)
    try:
        return child.wait()
    finally:
        os.tcsetpgrp(_STDIN, os.getpgrp())


if __name__ == "__main__":
    main()
