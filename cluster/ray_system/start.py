"""Starting Ray on this machine, and joining a Ray cluster. Replaces what Ray would do to the driver's process."""

import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import ray
import ray._private.services as ray_services
import ray._private.utils as ray_utils

from cluster.processes import INSTALL_FOLDER, Guard
from cluster.spec.errors import UserError

OBJECT_STORE_BYTES = 100_000_000
"""Size of Ray's object store, which holds a few call arguments but no requests, tokens or KV."""
PROBE_S = 5.0
"""Timeout of the check that something is listening at the address of an existing Ray cluster."""


def join_ray(address: str, common: dict[str, Any]) -> str:
    """Join a cluster. Return the address of its dashboard, empty if it has none.

    Raises:
        UserError: no cluster responds at the address.
    """
    try:
        _probe(address)
        with _signals_kept(), _own_import_path():
            return _dashboard_of(ray.init(address, **common))
    except UserError:
        raise
    except Exception as exc:  # Ray's exception class depends on the kind of address
        raise UserError(f"Ray at {address} cannot be used: {first_line(exc)}") from exc


def _probe(address: str) -> None:
    """Check that something is listening, because Ray would keep trying for ten minutes.

    Raises UserError or Ray's own error.
    """
    target = ray_services.canonicalize_bootstrap_address(address.removeprefix("ray://"))
    if target is None:
        return  # Ray would start a cluster
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), port), PROBE_S).close()
    except OSError as exc:
        why = f"{target}: {exc.strerror or exc}; allowed: host:port of a running Ray head node, or auto"
        raise UserError(f"Ray at {address} cannot be used: {why}") from exc


def start_ray(num_cpus: int, temp_dir: Path, guard: Guard, common: dict[str, Any], *, has_dashboard: bool) -> str:
    """Start Ray's daemons, each in a session that the guard knows. Return the address of the dashboard, if any.

    Raises:
        Exception: the daemons are not up within the 30 s that Ray waits.
    """
    with _signals_kept(), _own_import_path(), _daemons_apart(guard):
        context = ray.init(
            "local",
            num_cpus=num_cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=has_dashboard,
            _temp_dir=f"{temp_dir}/ray",  # Ray makes its folder writable by every account
            **common,
        )
    return _dashboard_of(context)


def _dashboard_of(context: Any) -> str:
    return f"http://{context.dashboard_url}" if context.dashboard_url else ""


def _signals_kept() -> AbstractContextManager[None]:
    """Keep the driver's own signal handlers: Ray's would raise SystemExit at any point, possibly with locks held."""
    return _replaced(ray_utils, "set_sigterm_handler", lambda _: None)


def _own_import_path() -> AbstractContextManager[None]:
    """Let actors import from where Baton is installed. Ray would put the current folder first, with any router.py."""
    return _replaced(os.path, "curdir", str(INSTALL_FOLDER))


def _daemons_apart(guard: Guard) -> AbstractContextManager[None]:
    """Start Ray's daemons in their own sessions, and register the sessions with the guard.

    Signals from the terminal, or sent to the driver's process group, then reach only the driver, which needs the
    daemons for an orderly shutdown. A session also identifies processes whose parent has died.
    """
    services: Any = ray_services
    theirs = services.ConsolePopen

    def start(*args: Any, **options: Any) -> Any:
        daemon = theirs(*args, start_new_session=True, **options)
        guard.watch(daemon.pid)
        return daemon

    return _replaced(services, "ConsolePopen", start)


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    theirs = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, theirs)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
