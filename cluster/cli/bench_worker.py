"""A process that measures for a command of `baton bench`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cluster.cli.bench import fail


@contextmanager
def bench_worker(name: str, timeout_s: float) -> Iterator[Callable[..., Any]]:
    """Calls a method of the worker ``name`` by its name, for each answer so long; what goes wrong ends the command."""
    from workers.worker_process import RemoteError, WorkerProcess

    process = WorkerProcess(name)

    def ask(method: str, *args: Any) -> Any:
        process.call(method, *args)
        return process.result(timeout_s)

    try:
        yield ask
    except RemoteError as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    finally:
        process.close()
