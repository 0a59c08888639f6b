"""TCP ports that Baton's processes listen on. Ports of Ray and NCCL are unknown here."""

from dataclasses import dataclass

from cluster.planner.model import ModelFacts, UnknownModel
from cluster.spec.config import DeployConfig, Device, PoolConfig, TransferBackendName, TransferProtocol
from cluster.spec.ids import Role
from cluster.spec.ranks import GroupName, groups, head_copy_groups, positions, sizes_of, stage_links, world_size
from cluster.spec.strategy import Collectives

EVERY_INTERFACE = "0.0.0.0"
_ATTENTION = (GroupName.ATTN_CP, GroupName.ATTN_TP, GroupName.ATTN_DP)
_EXPERTS = (GroupName.MOE_SHARDS, GroupName.MOE_BLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class PortPlan:
    """Listening TCP ports."""

    process: str
    purpose: str
    host: str | None
    """Host; None for the address of the node the process is placed on."""
    port: int | None
    """Port; None for a free one, taken at start."""
    count: int
    """Maximum number of ports."""


def ports_of(config: DeployConfig, model: ModelFacts | UnknownModel) -> list[PortPlan]:
    """Return all ports; those between ranks only as far as the model's shape is known."""
    router = config.router
    pools: list[tuple[Role, PoolConfig]] = [(Role.PREFILL, config.prefill), (Role.DECODE, config.decode)]
    sizes = [(pool.replicas, world_size(sizes_of(pool.parallel))) for _, pool in pools]
    num_workers = sum(replicas * size for replicas, size in sizes)
    is_mooncake = config.transfer.backend is TransferBackendName.MOONCAKE
    is_tcp = config.transfer.protocol is TransferProtocol.TCP
    gloo = sum(pool.replicas * _num_endpoints(role, pool, model) for role, pool in pools) if _uses_gloo(config) else 0
    taken_at_start = [
        ("bootstrap", "HTTP rank table", None, 1),
        ("router", "channel", None, router.processes),
        ("router", "commands from the driver", None, router.processes),
        ("worker", "channel", None, num_workers),
        ("replica", "rendezvous store of the ranks", None, sum(replicas for replicas, _ in sizes)),
        ("worker", "process groups over TCP (gloo)", None, gloo),
        ("worker", "handshake of Mooncake's engines", EVERY_INTERFACE, num_workers * is_mooncake),
        ("worker", "KV by Mooncake over TCP", EVERY_INTERFACE, num_workers * (is_mooncake and is_tcp)),
    ]
    clients = PortPlan(
        process="router", purpose="HTTP for clients", host=router.host, port=router.port or None, count=1
    )
    return [clients] + [
        PortPlan(process=process, purpose=purpose, host=host, port=None, count=count)
        for process, purpose, host, count in taken_at_start
        if count
    ]


def _uses_gloo(config: DeployConfig) -> bool:
    """Return whether ranks may use TCP: if configured, or if they are CPUs that may be on several machines."""
    if config.resources.collectives is Collectives.TCP:
        return True
    return config.resources.device is Device.CPU and config.transfer.backend is not TransferBackendName.SHARED_MEMORY


def _num_endpoints(role: Role, pool: PoolConfig, model: ModelFacts | UnknownModel) -> int:
    """Return the number of endpoints of one replica: every rank of each group of several ranks listens separately."""
    by_name, ranks = groups(pool.parallel), positions(pool.parallel)
    joined = [members for name in _ATTENTION for members in by_name[name]]
    if isinstance(model, ModelFacts):
        if model.config.moe is not None and len(by_name[GroupName.MOE_SHARDS][0]) > 1:
            joined += [members for name in _EXPERTS for members in by_name[name]]
        if role is Role.DECODE:
            joined += head_copy_groups(ranks, [group.num_heads for group in model.geometry.groups])
    links = sum(len(stage_links(pool.parallel, rank)) for rank in range(len(ranks)))
    return links + sum(len(members) for members in joined if len(members) > 1)
