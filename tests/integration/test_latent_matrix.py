"""Greedy fp32 tokens with latent attention equal transformers' under CP, with chunks, prefixes and batches.

In half of the families, a query uses 8 selected keys. transformers' indexers choose among keys with equal scores
arbitrarily; here, by position, as ours.
"""

from typing import Any

import pytest

from cluster.spec.strategy import Collectives
from tests.fakes.checkpoints import INDEXED, LATENT
from tests.fakes.local_engine import KV_WAYS, KvWay, LocalEngine, Models
from tests.fakes.pairwise import Case, all_in_turn, all_pairs
from tests.integration import test_engine_matrix as matrix

pytestmark = pytest.mark.integration

WORKER = matrix.WORKER
TURNING: dict[str, list[Any]] = {"family": [*LATENT, *INDEXED], "collectives": list(Collectives)}
WIDER: dict[str, list[Any]] = {**matrix.CROSSED, "cp": [1, 2, 3, 4, 8]}
ALL = [case for families in (LATENT, INDEXED) for case in all_in_turn(WIDER, {**TURNING, "family": list(families)})]


@pytest.mark.parametrize("case", matrix.in_loading_order(all_pairs(matrix.CROSSED | TURNING)), ids=matrix.name_of)
def test_tokens_equal_transformers_for_all_pairs_of_factors(models: Models, engine: LocalEngine, case: Case) -> None:
    matrix.check(case, models, engine)


@pytest.mark.mooncake
@pytest.mark.parametrize("kv", [KV_WAYS[0], *KV_WAYS[2:]], ids=str)
@pytest.mark.parametrize("family", [*LATENT, *INDEXED])
def test_tokens_equal_transformers_over_mooncake(models: Models, engine: LocalEngine, family: str, kv: KvWay) -> None:
    matrix.check({**matrix.MOONCAKE, "family": family, "kv": kv}, models, engine, backend="mooncake")


@pytest.mark.full
@pytest.mark.parametrize("case", matrix.in_loading_order(ALL), ids=matrix.name_of)
def test_tokens_equal_transformers_for_the_whole_matrix(models: Models, engine: LocalEngine, case: Case) -> None:
    matrix.check(case, models, engine, num_tokens=matrix.MANY_TOKENS)


@pytest.mark.parametrize("case", matrix.in_loading_order(all_pairs(matrix.CACHED | TURNING)), ids=matrix.name_of)
def test_tokens_do_not_depend_on_what_is_cached(models: Models, engine: LocalEngine, case: Case) -> None:
    matrix.check_caching(case, models, engine)


@pytest.mark.full
@pytest.mark.parametrize(
    "case", matrix.in_loading_order(all_pairs({**matrix.CACHED, "cp": [8]} | TURNING)), ids=matrix.name_of
)
def test_tokens_of_eight_ranks_do_not_depend_on_what_is_cached(models: Models, engine: LocalEngine, case: Case) -> None:
    matrix.check_caching(case, models, engine)
