"""Plan of a deployment: replicas with their ranks and groups, KV memory, ports, and every check. Pure."""

from dataclasses import dataclass

from cluster.planner.memory import KvPlan, kv_plan, memory_wanted, model_problems
from cluster.planner.model import ModelFacts, UnknownModel
from cluster.planner.ports import PortPlan, ports_of
from cluster.spec.checks import CHECKS
from cluster.spec.config import DeployConfig, PoolConfig, PrefillConfig
from cluster.spec.errors import ConfigError, Problem
from cluster.spec.ids import ReplicaId, Role, replica_id
from cluster.spec.ranks import GroupName, Position, groups, head_copy_groups, positions
from cluster.spec.registry import KvOwnership
from cluster.spec.strategy import CpMode, PassingSetting, StrategySetting


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """One replica to start."""

    role: Role
    name: ReplicaId
    ranks: list[Position]
    """Ranks by global rank."""
    groups: dict[GroupName, list[list[int]]]
    head_copies: list[list[int]]
    """Decode ranks that hold the same KV heads; empty if none do, or the model's shape is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsPlan:
    """Settings of prefill steps."""

    strategy: StrategySetting
    mode: CpMode
    """Context-parallel mode; `gather` also if a ring was configured for a single rank."""
    passing: PassingSetting | None
    """None in gather mode."""
    chunk_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One rule, and whether it holds."""

    rule: str
    passed: bool
    detail: str
    """Reason for a failure; empty when the rule holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that would be started."""

    name: str
    model: str
    """Model name for clients."""
    replicas: list[ReplicaPlan]
    steps: StepsPlan
    kv: KvPlan | None
    """KV memory; None if the model's shape is unknown."""
    ports: list[PortPlan]
    checks: list[CheckResult]


def make_plan(config: DeployConfig, model: ModelFacts | UnknownModel) -> Plan:
    """Return the plan of a configuration.

    Raises:
        ConfigError: the model does not allow the configured layout or KV format.
    """
    if isinstance(model, ModelFacts) and (problems := model_problems(config, model)):
        raise ConfigError(problems)
    prefill = _replicas(Role.PREFILL, config.prefill, model)
    decode = _replicas(Role.DECODE, config.decode, model)
    return Plan(
        name=config.name,
        model=config.model.name,
        replicas=prefill + decode,
        steps=_steps(config.prefill),
        kv=kv_plan(config, model) if isinstance(model, ModelFacts) else None,
        ports=ports_of(config, model),
        checks=_checks(config, model),
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


def _checks(config: DeployConfig, model: ModelFacts | UnknownModel) -> list[CheckResult]:
    results = [_result(check.rule, check.find(config)) for check in CHECKS]
    if isinstance(model, UnknownModel):
        results.append(CheckResult(rule="the model's shape is known", passed=False, detail=model.reason))
    else:
        results.append(CheckResult(rule="the model supports this parallel layout", passed=True, detail=""))
        results.append(_longest_request(config, model))
    return results


def _result(rule: str, problems: list[Problem]) -> CheckResult:
    return CheckResult(rule=rule, passed=not problems, detail="; ".join(str(problem) for problem in problems))


def _longest_request(config: DeployConfig, model: ModelFacts) -> CheckResult:
    rule = "every replica holds the longest request"
    longest = config.model.longest_context(model.config.max_position_embeddings)
    held = kv_plan(config, model).tokens_per_request
    if held >= longest:
        return CheckResult(rule=rule, passed=True, detail="")
    gib = f"{memory_wanted(config, model, longest):.3g}"
    detail = (
        f"{held} tokens fit, a request may have {longest}: set kv.memory_gib to {gib}, or model.max_context to {held}"
    )
    return CheckResult(rule=rule, passed=False, detail=detail)
