"""`baton status`: state and rates of a cluster on this machine, or a list of several clusters."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from cluster.cli.commands import Cluster
from cluster.cli.running import RunningCluster, control_path, find_running, running_clusters
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.registry import TableSnapshot
from cluster.supervisor.commands import StatusCommand

_ROUTER_S = 2.0
"""Maximum wait for the router, whose figures are an extra."""
_SAMPLE_S = 1.0
"""Time over which rates are measured."""


class RouterFigures(NamedTuple):
    """Requests and rates of one router process."""

    name: str
    num_open: int
    num_waiting: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    hit_rate: float
    """Part of all prompt tokens so far that were cached."""
    num_mismatches: int
    """Number of mismatches found by parity probes."""

    def __str__(self) -> str:
        rates = f"{self.prompt_tokens_per_s:,.0f} prompt tokens/s, {self.output_tokens_per_s:,.0f} output tokens/s"
        return f"{self.name}: {self.num_open} open, {self.num_waiting} waiting, {rates}, cache hits {self.hit_rate:.0%}"


def status(
    name: Cluster = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the state of a cluster that was started on this machine, or list several."""
    console = Console(highlight=False, soft_wrap=True)
    if name is None and len(running := running_clusters()) > 1 and not as_json:
        with ThreadPoolExecutor() as threads:
            for cluster, figures in zip(running, threads.map(_figures, running), strict=True):
                _print_facts(console, cluster)
                _print_figures(console, figures)
        return
    cluster = find_running(name)
    snapshot, troubles, figures = _read_table(cluster), _ask_driver(cluster), _figures(cluster)
    if as_json:
        typer.echo(_json(cluster, snapshot, troubles, figures))
        return

    _print_facts(console, cluster)
    if cluster.ray_environ:
        variables = " ".join(f"{name}={value}" for name, value in cluster.ray_environ.items())
        console.print(f"ray tools: export {variables}", markup=False)
    if cluster.ray_dashboard:
        console.print(f"ray dashboard: {cluster.ray_dashboard}", markup=False)
    if snapshot is None:
        console.print("the bootstrap service does not respond; it may be starting or restarting")
    elif snapshot.replicas:
        console.print(_replicas(snapshot))
        console.print(_ranks(snapshot))
    else:
        console.print("no replica has started yet")
    for line in troubles:
        console.print(line, markup=False)
    _print_figures(console, figures)


def _print_facts(console: Console, cluster: RunningCluster) -> None:
    endpoint = f"{cluster.router_url}/v1" if cluster.router_url else "starting"
    up = f"up {_age(cluster.process.age_s)}   driver {cluster.process.pid}"
    console.print(f"{cluster.name}   {endpoint}   model {cluster.model}   {up}", markup=False)
    console.print(f"logs: {cluster.logs}", markup=False)


def _figures(cluster: RunningCluster) -> RouterFigures | str | None:
    return read_figures(cluster.router_url) if cluster.router_url else None


def _print_figures(console: Console, figures: RouterFigures | str | None) -> None:
    if figures is None:
        return
    console.print(str(figures), markup=False)
    if isinstance(figures, RouterFigures) and figures.num_mismatches:
        count = f"{figures.num_mismatches}; see `baton logs router`"
        console.print(f"mismatches found by parity probes: {count}", markup=False)


def _ask_driver(cluster: RunningCluster) -> list[str]:
    """Return the driver's lines about what does not run or serve, or an empty list if it does not respond."""
    from cluster.cli.control import send_command

    try:
        (answer,) = send_command(control_path(cluster.name), StatusCommand())
    except PeerUnreachableError:
        return []
    return answer.line.splitlines()


def read_figures(router_url: str) -> RouterFigures | str:
    """Read a router's counts twice. Return the reason if it does not give them."""
    import httpx

    from cluster.bench.endpoint import EndpointError, checked, key_headers

    def read(client: httpx.Client) -> dict[str, Any]:
        reply: dict[str, Any] = checked(client.get("/status"), "router: ").json()
        return reply

    try:
        # One connection, because router processes share the port.
        with httpx.Client(base_url=router_url, timeout=_ROUTER_S, headers=key_headers()) as client:
            before = read(client)
            time.sleep(_SAMPLE_S)
            now = read(client)
    except EndpointError as error:
        return str(error)
    except httpx.HTTPError:
        return "router: does not respond"
    totals, seconds = now["totals"], max(float(now["time"] - before["time"]), _SAMPLE_S)

    def rate(name: str) -> float:
        count: float = totals[name] - before["totals"][name]
        return count / seconds

    return RouterFigures(
        name=now["router"]["name"],
        num_open=now["router"]["open"],
        num_waiting=now["router"]["waiting"],
        prompt_tokens_per_s=rate("prompt_tokens"),
        output_tokens_per_s=rate("generation_tokens"),
        hit_rate=totals["cached_tokens"] / max(1, totals["prompt_tokens"]),
        num_mismatches=int(totals["parity_mismatches"]),
    )


def _read_table(cluster: RunningCluster) -> TableSnapshot | None:
    from cluster.bootstrap.client import BootstrapClient

    if cluster.bootstrap_url is None:
        return None
    client = BootstrapClient(cluster.bootstrap_url, cluster.token)
    try:
        return client.table()
    except PeerUnreachableError:
        return None
    finally:
        client.close()


def _json(
    cluster: RunningCluster, snapshot: TableSnapshot | None, troubles: list[str], figures: RouterFigures | str | None
) -> str:
    fields = {
        "name": cluster.name,
        "model": cluster.model,
        "driver_pid": cluster.process.pid,
        "router_url": cluster.router_url,
        "bootstrap_url": cluster.bootstrap_url,
        "logs": cluster.logs,
        "ray_environ": cluster.ray_environ,
        "ray_dashboard": cluster.ray_dashboard,
        "not_running": troubles,
        "router": figures._asdict() if isinstance(figures, RouterFigures) else None,
        "table": snapshot,
    }
    return msgspec.json.format(msgspec.json.encode(fields), indent=2).decode()


def _replicas(snapshot: TableSnapshot) -> Table:
    # Short headers keep the table within 80 columns.
    headers = ("replica", "state", "up", "waiting", "running", "tokens", "free pages", "cached")
    table = Table(*headers, box=None, pad_edge=False)
    for entry in snapshot.replicas:
        load = entry.load
        state = "draining" if load.draining else "ready" if entry.ready else "not ready"
        counts = [load.num_waiting, load.num_running, load.num_tokens]
        pages = f"{load.free_pages}/{load.total_pages}"
        age = _age(time.time() - entry.incarnation / 1000)
        table.add_row(entry.replica, state, age, *map(str, counts), pages, str(load.cached_pages))
    return table


def _age(seconds: float) -> str:
    """Return a duration in its two largest units, as in "3 h 5 min"."""
    left = max(0, int(seconds))
    counts = []
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        counts.append((left // size, unit))
        left %= size
    first = next((index for index, (count, _) in enumerate(counts) if count), len(counts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in counts[first : first + 2])


def _ranks(snapshot: TableSnapshot) -> Table:
    headers = ("replica", "rank", "dp", "cp", "tp", "pp", "node", "device", "transfer")
    table = Table(*headers, box=None, pad_edge=False)
    for entry in snapshot.replicas:
        for record in entry.ranks:
            ranks = (record.global_rank, record.coords.dp, record.coords.cp, record.coords.tp, record.coords.pp)
            node = urlsplit(record.address).hostname
            table.add_row(entry.replica, *map(str, ranks), node, record.device, record.endpoint.backend)
    return table
