"""Plan of a deployment: ranks and groups of each replica, KV memory, ports, and checks. Pure."""

from dataclasses import dataclass

from cluster.planner.memory import KvPlan, kv_plan, longest_problem, model_problems
from cluster.planner.model import ModelFacts, UnknownModel
from cluster.planner.projections import ProjectionsPlan, projections_plan
from cluster.planner.traffic import TrafficPlan, traffic_plan
from cluster.spec.checks import CHECKS
from cluster.spec.config import (
    DeployConfig,
    Device,
    PoolConfig,
    PrefillConfig,
    TransferBackendName,
    TransferProtocol,
)
from cluster.spec.decode_graphs import why_not_captured
from cluster.spec.errors import ConfigError
from cluster.spec.ids import ReplicaId, Role, replica_id
from cluster.spec.ranks import GroupName, Position, groups, head_copy_groups, num_workers, positions, stage_links
from cluster.spec.registry import KvOwnership
from cluster.spec.strategy import CpMode, PassingSetting, StrategySetting

EVERY_INTERFACE = "0.0.0.0"
_ATTENTION = (GroupName.ATTN_CP, GroupName.ATTN_TP, GroupName.ATTN_DP)
_EXPERTS = (GroupName.MOE_SHARDS, GroupName.MOE_BLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    role: Role
    name: ReplicaId
    ranks: list[Position]
    groups: dict[GroupName, list[list[int]]]
    head_copies: list[list[int]]
    """Groups of decode ranks that hold the same KV heads; empty if there are none or the model's shape is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsPlan:
    strategy: StrategySetting
    mode: CpMode
    """Context-parallel mode; a ring of a single rank counts as `gather`."""
    passing: PassingSetting | None
    """Tensors that circulate in ring mode; None in gather mode."""
    chunk_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PortPlan:
    """TCP ports that Baton's processes listen on, except those of Ray and NCCL."""

    process: str
    purpose: str
    host: str | None
    """Address to listen on; None for the address of the process's machine."""
    port: int | None
    """Port; None for any free port."""
    count: int
    """Maximum number of ports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    rule: str
    passed: bool
    detail: str
    """Reason for a failure; empty if the rule holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that `baton up` would start."""

    name: str
    model: str
    replicas: list[ReplicaPlan]
    steps: StepsPlan
    not_captured: str
    """Reason why decode steps are not captured; empty if they are, or the model's shape is unknown."""
    kv: KvPlan | None
    """KV memory; None if the model's shape is unknown."""
    projections: ProjectionsPlan | None
    """Projections that CP ranks share; None if every rank holds all, or the model's shape is unknown."""
    traffic: TrafficPlan | None
    """Traffic between prefill ranks; None if the model's shape is unknown."""
    ports: list[PortPlan]
    checks: list[CheckResult]
    advice: str | None
    """Layout that would probably be faster, and why."""


def make_plan(config: DeployConfig, model: ModelFacts | UnknownModel) -> Plan:
    """Return the plan of a configuration.

    Raises:
        ConfigError: the model does not fit the configured layout, memory or context length.
    """
    facts = model if isinstance(model, ModelFacts) else None
    if facts and (problems := model_problems(config, facts)):
        raise ConfigError(problems)
    return Plan(
        name=config.name,
        model=config.model.name,
        replicas=[plan for role, pool in config.pools.items() for plan in _replicas(role, pool, model)],
        steps=_steps(config.prefill),
        not_captured=why_not_captured(config, config.decode, facts.config.limits) if facts else "",
        kv=kv_plan(config, facts) if facts else None,
        projections=projections_plan(config, facts) if facts else None,
        traffic=traffic_plan(config, facts) if facts else None,
        ports=ports_of(config, model),
        checks=_checks(config, model),
        advice=_advice(config),
    )


def _steps(prefill: PrefillConfig) -> StepsPlan:
    is_ring = prefill.ownership is KvOwnership.SHARDED
    return StepsPlan(
        strategy=prefill.strategy,
        mode=CpMode.RING if is_ring else CpMode.GATHER,
        passing=prefill.passing if is_ring else None,
        chunk_tokens=prefill.chunk_tokens,
    )


def _replicas(role: Role, pool: PoolConfig, model: ModelFacts | UnknownModel) -> list[ReplicaPlan]:
    ranks, rank_groups = positions(pool.parallel), groups(pool.parallel)
    copies = _head_copies(ranks, model) if role is Role.DECODE else []
    return [
        ReplicaPlan(role=role, name=replica_id(role, index), ranks=ranks, groups=rank_groups, head_copies=copies)
        for index in range(pool.replicas)
    ]


def _head_copies(ranks: list[Position], model: ModelFacts | UnknownModel) -> list[list[int]]:
    if isinstance(model, UnknownModel):
        return []
    same_heads = head_copy_groups(ranks, [group.num_heads for group in model.geometry.groups])
    return same_heads if len(same_heads) < len(ranks) else []


def _advice(config: DeployConfig) -> str | None:
    shares_cores = (
        config.resources.device is Device.CPU and config.transfer.backend is TransferBackendName.SHARED_MEMORY
    )
    if not shares_cores or config.prefill.skip_below_tokens:
        return None
    return (
        "where both roles share cores, workers wait for each other. Short prompts are served faster with "
        "prefill.skip_below_tokens: 1024, as in deploy/local-cpu-fast.yaml."
    )


def _checks(config: DeployConfig, model: ModelFacts | UnknownModel) -> list[CheckResult]:
    failures = {check.rule: "; ".join(map(str, check.find(config))) for check in CHECKS}
    if isinstance(model, UnknownModel):
        failures["the model's shape is known"] = model.reason
    else:
        failures["the model supports this parallel layout"] = ""
        failures["every replica holds the longest request"] = longest_problem(config, model)
    return [CheckResult(rule=rule, passed=not failure, detail=failure) for rule, failure in failures.items()]


def ports_of(config: DeployConfig, model: ModelFacts | UnknownModel) -> list[PortPlan]:
    """Return all ports; the ports between ranks are incomplete if the model's shape is unknown."""
    router = config.router
    pools = config.pools.values()
    workers = sum(map(num_workers, pools))
    is_mooncake = config.transfer.backend is TransferBackendName.MOONCAKE
    is_tcp = config.transfer.protocol is TransferProtocol.TCP
    gloo = sum(pool.replicas * _num_endpoints(role, pool, model) for role, pool in config.pools.items())
    taken_at_start = [
        ("bootstrap", "HTTP rank table", None, 1),
        ("router", "channel", None, router.processes),
        ("router", "commands from the driver", None, router.processes),
        ("worker", "channel", None, workers),
        ("replica", "rendezvous store of the ranks", None, sum(pool.replicas for pool in pools)),
        ("worker", "process groups over TCP (gloo)", None, gloo * config.uses_gloo),
        ("worker", "handshake of Mooncake's engines", EVERY_INTERFACE, workers * is_mooncake),
        ("worker", "KV by Mooncake over TCP", EVERY_INTERFACE, workers * (is_mooncake and is_tcp)),
    ]
    clients = PortPlan(
        process="router", purpose="HTTP for clients", host=router.host, port=router.port or None, count=1
    )
    return [clients] + [
        PortPlan(process=process, purpose=purpose, host=host, port=None, count=count)
        for process, purpose, host, count in taken_at_start
        if count
    ]


def _num_endpoints(role: Role, pool: PoolConfig, model: ModelFacts | UnknownModel) -> int:
    """Return how many gloo endpoints one replica has: one per rank in each group of several ranks or stage link."""
    by_name, ranks = groups(pool.parallel), positions(pool.parallel)
    joined = [members for name in _ATTENTION for members in by_name[name]]
    if pool.linear_shards is not None:
        joined += by_name[GroupName.ATTN_CP]
    if isinstance(model, ModelFacts):
        if model.config.experts_per_token and len(by_name[GroupName.MOE_SHARDS][0]) > 1:
            joined += [members for name in _EXPERTS for members in by_name[name]]
        if role is Role.DECODE:
            joined += head_copy_groups(ranks, [group.num_heads for group in model.geometry.groups])
    links = sum(len(stage_links(pool.parallel, rank)) for rank in range(len(ranks)))
    return links + sum(len(members) for members in joined if len(members) > 1)
