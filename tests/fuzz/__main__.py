"""Feed decoders mutated inputs for a time, in bounded memory: ``python -m tests.fuzz [TARGET ...] --seconds 600``.

Without targets, all of them run in turn. A finding is reported with the number that reproduces it and saved to a file,
and the exit code is 1. Findings are unexpected errors, inputs that take too much time or memory, and memory leaks.
"""

import argparse
import faulthandler
import gc
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.mutate import mutate
from tests.fuzz.targets import TARGETS

MOST_BYTES = 3 << 30
"""Limit of address space beyond the imports."""
MOST_LEFT_BYTES = 256 << 20
"""Limit of resident memory that all inputs after the first ones may leave behind."""
NUM_FIRST = 1000
HANG_S = 20
"""Longest time for one input. Compiled code that does not return ends the process after twice this time."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of processor time for each target")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    given = parser.parse_args()
    if unknown := set(given.targets) - set(TARGETS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; allowed: {', '.join(TARGETS)}")
    _bound_memory()
    signal.signal(signal.SIGALRM, _on_hang)
    num_finds = sum(not run(name, given.seconds, given.first) for name in given.targets or TARGETS)
    sys.exit(1 if num_finds else 0)


def run(name: str, seconds: float, first: int) -> bool:
    """Feed one target. Return False at the first finding."""
    target = TARGETS[name]
    seeds = target.seeds()
    end_s = time.process_time() + seconds
    number, before = first, 0
    with tempfile.NamedTemporaryFile(prefix=f"baton-fuzz-{name}-", delete=False) as kept:
        while time.process_time() < end_s:
            data = mutate(random.Random(number), seeds, target.codec)
            if not _feed(target.feed, data, Path(kept.name)):
                print(f"{name}: find at --first {number}, kept as {kept.name}")
                return False
            number += 1
            if number == first + NUM_FIRST:
                before = _resident_bytes()
    Path(kept.name).unlink()
    left = _resident_bytes() - before if before else 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    summary = f"{number - first} inputs, {left >> 20} MiB left behind, peak memory of the process {peak} MiB"
    print(f"{name}: {summary}", flush=True)
    return left <= MOST_LEFT_BYTES


def _feed(feed: Callable[[bytes], None], data: bytes, kept: Path) -> bool:
    """Feed one input, which stays saved unless it ends well."""
    kept.write_bytes(data)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    faulthandler.dump_traceback_later(2 * HANG_S, exit=True)
    try:
        feed(data)
    except KeyboardInterrupt:
        raise
    except BaseException:
        traceback.print_exc()
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    return True


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _on_hang(*_: object) -> None:
    raise TimeoutError(f"one input took longer than {HANG_S} s")


if __name__ == "__main__":
    main()
