"""Feeds decoders mutated inputs for a time, in bounded memory: ``python -m tests.fuzz [TARGET ...] --seconds 600``.

Without targets, all of them in turn. A find is told with the seed that makes it again and kept in a file; exit code 1.
"""

import argparse
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.fuzz.mutate import mutate
from tests.fuzz.targets import TARGETS

MOST_BYTES = 3 << 30
"""Of address space beyond what the imports take."""
HANG_S = 20
"""Longest time for one input."""


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of each target")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    given = parser.parse_args()
    if unknown := set(given.targets) - set(TARGETS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; allowed: {', '.join(TARGETS)}")
    _bound_memory()
    signal.signal(signal.SIGALRM, _on_hang)
    num_finds = sum(not run(name, given.seconds, given.first) for name in given.targets or TARGETS)
    sys.exit(1 if num_finds else 0)


def run(name: str, seconds: float, first: int) -> bool:
    """Feed one target; False at the first find."""
    target = TARGETS[name]
    seeds = target.seeds()
    end_s = time.monotonic() + seconds
    number = first
    while time.monotonic() < end_s:
        data = mutate(random.Random(number), seeds, target.codec)
        signal.setitimer(signal.ITIMER_REAL, HANG_S)
        try:
            target.feed(data)
        except BaseException as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if isinstance(error, KeyboardInterrupt):
                raise
            path = Path(tempfile.gettempdir(), f"baton-fuzz-{name}-{number}")
            path.write_bytes(data)
            traceback.print_exc()
            print(f"{name}: find at --first {number}, kept as {path}")
            return False
        number += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{name}: {number - first} inputs, no find; peak memory of the process {peak} MiB", flush=True)
    return True


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _on_hang(*_: object) -> None:
    raise TimeoutError(f"one input took longer than {HANG_S} s")


if __name__ == "__main__":
    main()
