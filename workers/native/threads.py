"""Threads that divide the work of native calls."""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

from workers.native.recording import run

LEAST_SHARED = 1 << 17
"""Minimum number of elements for which rows are divided among threads."""

Function = Callable[..., int]


class Threads:
    """Threads, including the caller's, on which functions of the compiled library run.

    Calls are recorded where ``recorded_in`` says so.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count, "native")

    def share(self, function: Function, given: tuple[object, ...], num_rows: int, *, is_large: bool) -> None:
        """Call ``function`` for all rows, divided among the threads if the work is large.

        The function takes what is ``given``, then the first row, and the end of the rows.
        """
        if self._count == 1 or not is_large:
            run(partial(function, *given, 0, num_rows))
        else:
            run(partial(self._run_parts, function, given, num_rows))

    def take_turns(self, function: Function, given: ctypes.Structure, next_part: ctypes.c_int64) -> None:
        """Run a function that takes parts of the work, counted by ``next_part``, until none is left, on all threads.

        Raises MemoryError if it returns a number other than 0.
        """
        run(partial(self._run_turns, function, given, next_part))

    def _run_turns(self, function: Function, given: ctypes.Structure, next_part: ctypes.c_int64) -> None:
        next_part.value = 0
        pointer = ctypes.byref(given)
        calls = [self._pool.submit(function, pointer) for _ in range(self._count - 1)]
        if any([function(pointer), *(call.result() for call in calls)]):
            raise MemoryError("out of memory for intermediate results")

    def _run_parts(self, function: Function, given: tuple[object, ...], num_rows: int) -> None:
        ends = [num_rows * part // self._count for part in range(self._count + 1)]
        calls = [self._pool.submit(function, *given, *part) for part in pairwise(ends[1:])]
        function(*given, 0, ends[1])
        for call in calls:
            call.result()
