"""Sharded CP: every rank has all heads and a part of the tokens. Greedy fp32 tokens equal transformers', and ranks
receive as many bytes in each layer as `baton plan` expects.
"""

from statistics import fmean
from typing import Any, NamedTuple

import pytest

from cluster.planner.model import facts_of
from cluster.planner.traffic import TrafficPlan, traffic_plan
from cluster.spec.config import DeployConfig, ParallelConfig
from cluster.spec.ids import Role
from cluster.spec.ranks import GroupName
from cluster.spec.strategy import Collectives, MoeDispatch, StrategySetting
from tests.fakes.local_engine import KV_WAYS, NUM_LOGPROBS, KvWay, LocalEngine, Models, asked, prompts_of
from tests.fakes.pairwise import all_pairs

pytestmark = pytest.mark.integration

WORKER = "tests.fakes.traffic_worker:TrafficWorker"
NUM_TOKENS = 8
LENGTHS = (1, 33, 90, 5, 2)
STEP_TOKENS = 96
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {},
    "deepseek_v3": {},
    "deepseek_v32": {"first_k_dense_replace": 0},
    "glm_moe_dsa": {"mlp_layer_types": ["sparse"] * 4, "indexer_types": ["full", "shared", "shared", "shared"]},
    "qwen3_moe": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
}
_, ALL_RANKS, PASS_KV, PASS_Q = KV_WAYS


class Case(NamedTuple):
    family: str
    parallel: ParallelConfig
    kv: KvWay = ALL_RANKS
    strategy: StrategySetting = StrategySetting.ZIGZAG
    dispatch: MoeDispatch = MoeDispatch.AUTO
    chunk_tokens: int = STEP_TOKENS
    collectives: Collectives = Collectives.AUTO

    def __str__(self) -> str:
        sizes = "_".join(f"{axis}{size}" for axis, size in self.parallel if size > 1)
        return "-".join(map(str, (self.family, sizes, *self[2:])))


def config_of(case: Case) -> DeployConfig:
    return DeployConfig.model_validate(
        {
            "model": {"served_name": case.family},
            "kv": {"page_size": 16, "memory_gib": 0.01},
            "prefill": {
                "parallel": case.parallel,
                "mode": case.kv.mode,
                "passing": case.kv.passing,
                "strategy": case.strategy,
                "chunk_tokens": case.chunk_tokens,
            },
            "resources": {"collectives": case.collectives, "moe_dispatch": case.dispatch},
            "transfer": {"mode": case.kv.sends},
        }
    )


def check(case: Case, models: Models, engine: LocalEngine, lengths: tuple[int, ...]) -> None:
    prompts, folder = prompts_of(lengths), models.folder(case.family, **MODELS[case.family])
    oracle = models.oracle(folder, NUM_TOKENS)
    with engine.running(folder, config_of(case)) as cluster:
        answers = cluster.answer(asked(prompts, NUM_TOKENS, NUM_LOGPROBS), timeout_s=120)
    for prompt, answer in zip(prompts, answers, strict=True):
        oracle.check(prompt, answer)


FACTORS: dict[str, list[Any]] = {
    "family": list(MODELS),
    "parallel": [
        *(ParallelConfig(cp=cp, ep=ep, moe_dp=moe_dp) for cp in (2, 4, 8) for ep, moe_dp in ((cp, 1), (1, 1), (1, cp))),
        *(ParallelConfig(cp=cp, ep=cp, pp=2) for cp in (2, 4)),
    ],
    "kv": KV_WAYS,
    "strategy": list(StrategySetting),
    "dispatch": list(MoeDispatch),
    "chunk_tokens": [37, 3, 4096],
    "collectives": list(Collectives),
}


@pytest.mark.full
@pytest.mark.parametrize("case", sorted((Case(**case) for case in all_pairs(FACTORS)), key=str), ids=str)
def test_tokens_equal_transformers_for_all_pairs_of_factors(models: Models, engine: LocalEngine, case: Case) -> None:
    check(case, models, engine, LENGTHS)


CP8, CP4, TP4 = ParallelConfig(cp=8, ep=8), ParallelConfig(cp=4, ep=4), ParallelConfig(tp=4, ep=4)
COUNTED = [
    Case("deepseek_v32", CP8, dispatch=MoeDispatch.GATHER),
    Case("deepseek_v32", CP4, dispatch=MoeDispatch.GATHER, collectives=Collectives.TCP),
    Case("deepseek_v32", CP4, PASS_KV, dispatch=MoeDispatch.ALL_TO_ALL),
    Case("deepseek_v32", CP4, PASS_Q, dispatch=MoeDispatch.GATHER),
    Case("glm_moe_dsa", CP4, PASS_Q, dispatch=MoeDispatch.GATHER),
    Case("deepseek_v32", ParallelConfig(cp=4, moe_dp=4)),
    Case("deepseek_v32", ParallelConfig(cp=2, tp=2, ep=4), dispatch=MoeDispatch.GATHER),
    Case("deepseek_v32", TP4, dispatch=MoeDispatch.GATHER),
]


def received_bytes(engine: LocalEngine) -> dict[str, float]:
    """Return the bytes that a prefill rank received in a layer of the last step, on average, by group.

    This is the second layer, as experts of the last one get few tokens, but for CP all layers, as some select no keys.
    """
    by_rank = engine.ask(Role.PREFILL, "layer_bytes")

    def received(group: str) -> float:
        chosen = slice(None) if group == GroupName.ATTN_CP else slice(1, 2)
        return fmean(layer.get(group, 0) for layers in by_rank for layer in layers[chosen])

    return {group: received(group) for group in {group for layers in by_rank for layer in layers for group in layer}}


def traffic_of(case: Case, models: Models) -> TrafficPlan:
    config, folder = config_of(case), models.folder(case.family, **MODELS[case.family])
    return traffic_plan(config, facts_of(config, folder))


@pytest.mark.parametrize("case", COUNTED, ids=str)
def test_ranks_receive_the_planned_bytes(models: Models, engine: LocalEngine, case: Case) -> None:
    check(case, models, engine, LENGTHS)
    engine.ask(Role.PREFILL, "layer_bytes")
    check(case, models, engine, (STEP_TOKENS,))
    received, plan = received_bytes(engine), traffic_of(case, models)
    # Log-sum-exps, which the plan leaves out, travel with partial results.
    tolerance = 0.02 if case.kv is PASS_Q else 0.0
    assert received.pop(GroupName.ATTN_CP, 0) == pytest.approx(plan.context_bytes, rel=tolerance)
    # All-to-all is planned for random routing, and random weights do not route at random.
    tolerance = 0.2 if plan.dispatch is MoeDispatch.ALL_TO_ALL else 0.0
    others = plan.attention_bytes + plan.mlp_bytes + plan.expert_bytes
    assert sum(received.values()) == pytest.approx(others, rel=tolerance)


def test_sharded_cp_exchanges_latents_and_routed_tokens_only(models: Models) -> None:
    """Compare layouts of eight ranks: whole heads need no sums, and latents are narrower than hidden states."""
    sharded, tensor = (
        traffic_of(Case("deepseek_v32", ParallelConfig(ep=8, **axis)), models) for axis in ({"cp": 8}, {"tp": 8})
    )
    latent, index, hidden = 16 + 8, 20, 64
    share = 7 / 8 * STEP_TOKENS * 4
    assert sharded.context_bytes == share * (latent + index)
    assert (sharded.attention_bytes, sharded.mlp_bytes, tensor.context_bytes) == (0, 0, 0)
    assert tensor.attention_bytes == tensor.mlp_bytes == 2 * share * hidden
    assert sharded.total_bytes < tensor.total_bytes / 2
