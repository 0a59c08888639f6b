"""Record of native calls, which can be made again while their tensors live."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local

Call = Callable[[], object]


class _Recording(local):
    calls: list[Call] | None = None


_recording = _Recording()


@contextmanager
def recorded_in(calls: list[Call]) -> Iterator[None]:
    """Append all native calls of this thread to ``calls``."""
    assert _recording.calls is None, "calls are already recorded"
    _recording.calls = calls
    try:
        yield
    finally:
        _recording.calls = None


def run(call: Call) -> None:
    """Make a native call, and record it if calls are recorded."""
    call()
    if _recording.calls is not None:
        _recording.calls.append(call)
