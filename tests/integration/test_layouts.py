"""Greedy fp32 tokens equal transformers' for every legal layout of prefill and decode, dense and with experts."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest

from cluster.spec.config import DeployConfig, ParallelConfig
from cluster.spec.registry import Verify
from cluster.spec.strategy import Collectives, CpMode, MoeDispatch, Strategy
from tests.fakes.layouts import WIDE, covering_pairs, divided, legal_layouts, needs_experts, num_ranks
from tests.fakes.local_engine import KV_WAYS, KvWay, LocalEngine, Models, asked, prompts_of
from tests.fakes.pairwise import all_pairs

NUM_TOKENS = 12
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_hidden_layers": 3, "mlp_only_layers": [2]},
    "qwen3_moe": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "mixtral": {"num_hidden_layers": 3, "num_local_experts": 8},
    "glm4_moe": {"num_hidden_layers": 3},
    "deepseek_v2": {"num_hidden_layers": 3},
    "deepseek_v3": {"num_hidden_layers": 3},
    "deepseek_v32": {},
    "glm_moe_dsa": {"indexer_types": ["full", "shared", "shared", "shared"]},
    "llama": {"num_hidden_layers": 3, "mlp_bias": True},
}
"""Models by family, with so many layers that stages are unequal. Only the last one has no experts."""
ODD: dict[str, Any] = {"vocab_size": 251, "intermediate_size": 97}
"""Sizes that divide evenly on one rank only."""
DENSE_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True, **ODD},
    "qwen2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
    "qwen3": {"num_key_value_heads": 1},
    "deepseek_v2": {"q_lora_rank": None, "first_k_dense_replace": 2},
    "deepseek_v32": {"first_k_dense_replace": 3, "attention_bias": True},
    "glm_moe_dsa": {"first_k_dense_replace": 4},
}
"""Models with biases and norms of every kind, with 1 to 4 KV heads, with one latent for all heads, and with selected
keys.
"""
TENSOR_PARALLEL: dict[str, list[Any]] = {
    "family": list(DENSE_MODELS),
    "prefill": [ParallelConfig(cp=cp, tp=tp) for cp, tp in ((1, 1), (1, 4), (2, 1), (2, 2))],
    "decode": [ParallelConfig(tp=tp) for tp in (1, 2, 4)],
    "kv": KV_WAYS,
    "chunk_tokens": [4096, 37],
}
LENGTHS = (1, 33, 90, 5)
STRATEGIES = (Strategy.ZIGZAG, Strategy.INTERLEAVE, Strategy.NONE, Strategy.WHOLE_REQUEST, Strategy.CONTIGUOUS)


class Case(NamedTuple):
    """One cluster."""

    family: str
    prefill: ParallelConfig
    decode: ParallelConfig
    kv: KvWay
    strategy: Strategy
    chunk_tokens: int
    dispatch: MoeDispatch
    collectives: Collectives
    model: Mapping[str, Any]

    def __str__(self) -> str:
        ways = (self.kv, self.strategy, self.chunk_tokens, self.dispatch, self.collectives)
        return f"{self.family}-{_name(self.prefill)}-to-{_name(self.decode)}-{'-'.join(map(str, ways))}"


def _name(parallel: ParallelConfig) -> str:
    return "_".join(f"{axis}{size}" for axis, size in parallel if size > 1) or "one"


class Side(NamedTuple):
    """Model of some family, and the layout of one role."""

    family: str
    layout: ParallelConfig

    @property
    def traits(self) -> frozenset[str]:
        """Return the axes with several ranks, and the family."""
        return divided(self.layout, has_experts=self.family != "llama") | {self.family}


def sides_of(layouts: Sequence[ParallelConfig]) -> list[Side]:
    """Return each layout with each family that supports it."""
    sides = [Side(family, layout) for layout in layouts for family in MODELS]
    return [side for side in sides if side.family != "llama" or not needs_experts(side.layout)]


def cases_of(prefills: list[Side], decodes: list[Side]) -> list[Case]:
    """Return each prefill layout once, with all other settings in rotation, those with CP ranks first."""
    cases = []
    for turn, (family, layout) in enumerate(sorted(prefills, key=lambda side: -side.layout.cp)):
        fitting = [decode.layout for decode in decodes if decode.family == family]
        ways = KV_WAYS if layout.cp > 1 else [way for way in KV_WAYS if way.mode is CpMode.GATHER]
        cases.append(
            Case(
                family=family,
                prefill=layout,
                decode=fitting[turn % len(fitting)],
                kv=ways[turn % len(ways)],
                # Five strategies and four ways meet in all combinations within twenty cases.
                strategy=STRATEGIES[turn % len(STRATEGIES)],
                chunk_tokens=(37, 4096)[turn // 3 % 2],
                dispatch=tuple(MoeDispatch)[turn % 3],
                collectives=tuple(Collectives)[turn % 2],
                model=MODELS[family],
            )
        )
    return in_loading_order(cases)


def tensor_parallel_cases() -> list[Case]:
    """Return any two sizes of prefill and decode for dense models."""
    others = {"strategy": Strategy.ZIGZAG, "dispatch": MoeDispatch.AUTO, "collectives": Collectives.AUTO}
    cases = [{**case, **others, "model": DENSE_MODELS[case["family"]]} for case in all_pairs(TENSOR_PARALLEL)]
    return in_loading_order([Case(**case) for case in cases])


def in_loading_order(cases: list[Case]) -> list[Case]:
    return sorted(cases, key=lambda case: (case.family, _name(case.prefill), _name(case.decode)))


def config_of(case: Case) -> DeployConfig:
    verify = Verify.DIGEST if case.chunk_tokens == 37 else Verify.COUNTS
    return DeployConfig.model_validate(
        {
            "model": {"served_name": case.family},
            "kv": {"page_size": 16, "memory_gib": 0.01},
            "prefill": {
                "parallel": case.prefill,
                "strategy": case.strategy,
                "mode": case.kv.mode,
                "passing": case.kv.passing,
                "chunk_tokens": case.chunk_tokens,
            },
            "decode": {"parallel": case.decode.model_dump(exclude={"cp", "moe_dp"})},
            "transfer": {"mode": case.kv.sends, "verify": verify},
            "resources": {"collectives": case.collectives, "moe_dispatch": case.dispatch},
        }
    )


def check(case: Case, models: Models, engine: LocalEngine) -> None:
    """Run all prompts together twice. The second time, their pages are cached on both sides."""
    prompts, folder = prompts_of(LENGTHS), models.folder(case.family, **case.model)
    theirs = [models.oracle(folder, NUM_TOKENS).tokens(prompt) for prompt in prompts]
    with engine.running(folder, config_of(case)) as cluster:
        for _ in range(2):
            assert cluster.generate(asked(prompts, NUM_TOKENS), timeout_s=120) == theirs


def covering(layouts: list[ParallelConfig]) -> list[Side]:
    """Return few layouts in which any two axes meet, and each family meets each axis, preferably with few ranks."""
    return covering_pairs(sides_of(sorted(layouts, key=num_ranks)), lambda side: side.traits)


WIDE_DECODES = [layout for layout in WIDE if layout.cp == 1]
SOME = cases_of(covering(legal_layouts(4)), covering(legal_layouts(4, is_decode=True)))
ALL = [
    case._replace(collectives=collectives)
    for case in cases_of(sides_of(legal_layouts(8) + WIDE), sides_of(legal_layouts(8, is_decode=True) + WIDE_DECODES))
    for collectives in Collectives
]
"""Cases over shared memory and over TCP."""


def test_every_strategy_meets_every_kv_mode() -> None:
    met = {(case.strategy, case.kv) for case in ALL if case.prefill.cp > 1}
    assert met == set(product(STRATEGIES, KV_WAYS))


@pytest.mark.integration
@pytest.mark.parametrize("case", [*SOME, *tensor_parallel_cases()], ids=str)
def test_tokens_equal_transformers_where_any_two_axes_and_families_meet(
    models: Models, engine: LocalEngine, case: Case
) -> None:
    check(case, models, engine)


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.parametrize("case", ALL, ids=str)
def test_tokens_equal_transformers_for_every_layout(models: Models, engine: LocalEngine, case: Case) -> None:
    check(case, models, engine)
