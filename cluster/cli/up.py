"""`baton up`: start a cluster, keep it running, and stop it."""

import errno
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.plan import Changes, File, overrides
from cluster.cli.running import Note, RunningCluster, control_path
from cluster.cli.stop_signals import StopSignals
from cluster.log_files import LogSession
from cluster.logs import ProcessLog, set_up_logs
from cluster.processes import start_trimming, this_process
from cluster.ray_system.environ import set_for_own_cluster
from cluster.spec.clock import LEASE_S
from cluster.spec.config import DeployConfig
from cluster.spec.env import TOKEN, check_environ, take_secrets
from cluster.spec.errors import BatonError, ConfigError, Problem, SystemLostError, UserError
from cluster.spec.ids import Incarnation
from cluster.spec.loader import DEFAULT_FILE, load_config
from cluster.spec.ranks import num_workers

if TYPE_CHECKING:
    from cluster.actors import ActorSystem
    from cluster.cli.start import StartProgress
    from cluster.launch.launcher import Launcher
    from cluster.launch.tools import Tools
    from cluster.ray_system.adapter import RaySystem
    from cluster.spec.registry import TableSnapshot
    from cluster.supervisor.loop import Supervisor

_WATCH_S = 1.0
"""Maximum wait for a change in the table. Each answer is also a sign of life of the bootstrap service."""
_LOOK_S = 0.5
"""Interval between checks of the actor system."""


def up(
    file: File = DEFAULT_FILE,
    model: Annotated[str | None, typer.Option(help="Model to serve instead of the file's.")] = None,
    changes: Changes = None,
    address: Annotated[
        str | None,
        typer.Option(envvar="RAY_ADDRESS", help="Ray cluster to join. Default: start one on this machine."),
    ] = None,
    worker_logs: Annotated[bool, typer.Option("--worker-logs", help="Show the workers' output.")] = False,
) -> None:
    """Start the cluster described by a deploy file and keep it running until Ctrl-C or `baton down`."""
    config = load_config(file, overrides(changes or [], model))
    check_environ()
    _check_keys(config)
    _check_port(config)
    session = LogSession.new(config.name)
    try:
        _run(config, session, address, worker_logs)
    except UserError:
        raise
    except BatonError as error:
        if session.folder.exists():
            typer.echo(f"logs: {session.folder} (baton logs --cluster {config.name})", err=True)
        _explain(error)
        if isinstance(error, SystemLostError):
            # Ray's threads still wait for its daemons, and crash when the interpreter ends.
            sys.stderr.flush()
            os._exit(1)
        raise typer.Exit(1) from None
    except KeyboardInterrupt as interrupt:
        typer.echo("stopped while starting", err=True)
        raise typer.Exit(128 + signal.Signals[str(interrupt) or "SIGINT"]) from None


def _check_keys(config: DeployConfig) -> None:
    """Raise UserError if the API keys cannot be read. Routers read them on this machine, too."""
    from router.api_keys import read_keys

    read_keys(config.router)


def _check_port(config: DeployConfig) -> None:
    host, port = config.router.host, config.router.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as exc:
        is_ours = exc.errno not in (socket.EAI_NONAME, errno.EADDRNOTAVAIL)
        key, allowed = ("port", "a free port, or 0 for any") if is_ours else ("host", "an address of this machine")
        reason = str(exc.strerror).partition(" (while")[0]
        message = f"cannot listen on {host}:{port}: {reason}; allowed: {allowed}"
        raise ConfigError([Problem(f"router.{key}", message)]) from exc


def _run(config: DeployConfig, session: LogSession, address: str | None, worker_logs: bool) -> None:
    from cluster.cli.start import StartProgress
    from cluster.launch.waits import Capacity, await_capacity

    progress = StartProgress()
    signals = StopSignals(lambda name: progress.line(f"{name}: stopping once Ray has started"))
    running = RunningCluster(
        name=config.name,
        process=this_process(),
        model=config.model.name,
        logs=str(session.folder),
        token=TOKEN.get() or secrets.token_hex(32),
    )
    taken = take_secrets()
    start_trimming()
    with Note(running) as note, progress:
        with signals.interrupting():
            model = config.model.path if address else _resolve(config, progress)
        # A start that is refused until here removes no logs of other starts.
        set_up_logs(ProcessLog(process="driver", config=config.log, session=session), to_stderr=False)
        progress.stage("ray", "joining" if address else "starting")
        if not address:
            set_for_own_cluster()
        from cluster.ray_system.adapter import RaySystem

        signals.check()
        if address:  # the Ray cluster is not ours to stop
            signals.leave_at_second(partial(_leave, note, progress))
        with RaySystem(
            f"baton-{config.name}",
            address,
            _num_cpus(config),
            worker_logs=worker_logs,
            has_dashboard=config.resources.ray_dashboard,
        ) as system:
            signals.check()
            progress.stage("ray", "ready")
            note.update(ray_environ=system.environ, ray_dashboard=system.dashboard_url)
            _check_alone(system, config.name)
            if address:  # no machine can join a Ray cluster that we have started
                capacity = Capacity(config=config, machines=system.machines)
                await_capacity(system, capacity, config.resources.start_timeout_s, progress.line, signals.check)
            _supervise(_tools(system, progress, session, taken), config, model, note, progress, signals)
    if note.cluster.router_url is None:
        signals.check()
    progress.line("stopped")


def _leave(note: Note, progress: "StartProgress", number: int) -> None:
    """End the process immediately, with the exit code that a shell reports for the signal."""
    progress.finish()
    note.remove()
    os._exit(128 + number)


def _tools(system: "RaySystem", progress: "StartProgress", session: LogSession, taken: Mapping[str, str]) -> "Tools":
    from cluster.channel import draw_key
    from cluster.launch.tools import Tools, send

    key = draw_key()
    return Tools(
        system=system,
        progress=progress.stage,
        send=partial(send, key=key),
        channel_key=key,
        session=session,
        secrets=taken,
    )


def _supervise(
    tools: "Tools", config: DeployConfig, model: str, note: Note, progress: "StartProgress", signals: StopSignals
) -> None:
    from cluster.cli.control import serve_commands
    from cluster.launch.launcher import Launcher
    from cluster.supervisor.events import Failed, RouterSeen
    from cluster.supervisor.loop import Supervisor
    from cluster.supervisor.reconcile import RESTART_BACKOFF_S

    def on_up() -> None:
        for name in launcher.routers:
            arguments = (name, partial(saw_router, name))
            threading.Thread(target=launcher.follow_router, args=arguments, daemon=True).start()
        _announce(launcher, config, note, progress)

    def saw_router(name: str, responds: bool) -> None:
        supervisor.post(RouterSeen(name, responds))

    def on_failed(name: str, incarnation: Incarnation, error: BaseException) -> None:
        supervisor.post(Failed(name, incarnation, error))

    supervisor = Supervisor(RESTART_BACKOFF_S, on_up, progress.line, config.resources.silence_s - LEASE_S)
    launcher = Launcher(tools, config, model, note.cluster.token, on_failed)
    signals.pass_on(supervisor.request_stop)
    threading.Thread(target=_follow_table, args=(launcher, tools, supervisor, note), daemon=True).start()
    threading.Thread(target=_watch_system, args=(tools.system, supervisor), daemon=True).start()
    try:
        with serve_commands(control_path(config.name), supervisor.give):
            supervisor.run(launcher)
    finally:
        tools.system.is_urgent = supervisor.is_urgent


def _follow_table(launcher: "Launcher", tools: "Tools", supervisor: "Supervisor", note: Note) -> None:
    from cluster.bootstrap.client import follow_table
    from cluster.supervisor.events import TableLost, TableSeen, TableUnchanged

    try:
        rendezvous = launcher.rendezvous.result()
    except BatonError:
        return  # the supervisor handles this error
    note.update(bootstrap_url=rendezvous.bootstrap_url)
    table = tools.connect(rendezvous)

    def watch(version: int, timeout_s: float) -> "TableSnapshot | None":
        snapshot = table.watch(version, timeout_s)
        supervisor.post(TableUnchanged() if snapshot is None else TableSeen.of(snapshot))
        return snapshot

    for _ in follow_table(watch, lambda: _WATCH_S, lambda: supervisor.post(TableLost())):
        continue


def _watch_system(system: "ActorSystem", supervisor: "Supervisor") -> None:
    from cluster.supervisor.events import SystemLost

    while not (reason := system.why_lost()):
        time.sleep(_LOOK_S)
    supervisor.post(SystemLost(reason))


def _announce(launcher: "Launcher", config: DeployConfig, note: Note, progress: "StartProgress") -> None:
    from cluster.cli.start import ready_text, wait_ready

    progress.stage("endpoint", "waiting")
    wait_ready(launcher.router_url)
    progress.stage("endpoint", "ready")
    note.update(router_url=launcher.router_url)
    progress.finish()
    typer.echo(ready_text(launcher.router_url, config, note.cluster.logs))


def _resolve(config: DeployConfig, progress: "StartProgress") -> str:
    """Download and check the model for a cluster on this machine; return its folder."""
    from cluster.cli.start import check_files, check_model
    from workers.models.recall_weights import BUILT_IN
    from workers.models.resolve import resolve_model

    progress.stage("model", "searching")
    folder = resolve_model(config.model.path).absolute()
    check_model(config, folder, progress.line)
    if config.model.path not in BUILT_IN:
        progress.stage("model", "checking the files")
        check_files(folder)
    progress.stage("model", "ready")
    return str(folder)


def _num_cpus(config: DeployConfig) -> int:
    """Return the number of logical CPUs of our own Ray cluster: this machine's, or more if the workers request more."""
    workers = sum(map(num_workers, config.pools.values()))
    return max(math.ceil(workers * config.resources.cpus_per_worker), os.cpu_count() or 1)


def _check_alone(system: "RaySystem", name: str) -> None:
    if names := system.taken_names():
        raise UserError(
            f"a cluster named {name!r} is already running on this Ray cluster "
            f"({len(names)} actors, {sorted(names)[0]} ...); stop it, or give this one another name"
        )


def _explain(error: BaseException) -> None:
    """Print the error in one line, then the output of the process that caused it."""
    typer.echo(f"error: {error}", err=True)
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:  # Ray raises errors from themselves
        chain.append(cause)
    for cause in chain:
        for note in getattr(cause, "__notes__", []):
            typer.echo(note, err=True)
