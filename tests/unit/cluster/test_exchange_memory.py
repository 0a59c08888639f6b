"""Arithmetic of the memory that CP ranks take to exchange keys, values and queries."""

from dataclasses import replace

import pytest

from cluster.planner.exchange_memory import CpExchange, staging_bytes
from cluster.spec.config import DeployConfig
from cluster.spec.strategy import Passing
from workers.layers.config import Activations
from workers.models.interface import LayerCost

T, N, L, CP = 100, 400, 10_000, 4
ROW, QUERY, RESULT, PARTIAL, INDEX = 8, 32, 30, 60, 5
GATHER = CpExchange(
    cp=CP,
    num_tokens=T,
    chunk_tokens=N,
    longest=L,
    row=ROW,
    query=QUERY,
    partial=PARTIAL,
    result=RESULT,
    index=INDEX,
    selects_keys=False,
    expands_keys=False,
    passing=None,
    in_background=False,
)
PASS_KV, PASS_Q = (replace(GATHER, passing=passing, in_background=True) for passing in Passing)


COST = LayerCost(
    queries=0,
    kv=0,
    whole=0,
    dense=0,
    experts=0,
    routed=0,
    experts_per_token=0,
    activations=(Activations(num_bytes=9_000), Activations(num_bytes=8_000)),
    merging=(Activations(num_bytes=10_000),),
    index_flops=0,
    dense_width=0,
    routed_width=0,
)


def attention_bytes(exchange: CpExchange) -> float:
    return exchange.attention_bytes(COST, lambda activations: activations.num_bytes)


def test_buffers_hold_new_rows_or_two_blocks_or_all_queries() -> None:
    assert GATHER.buffers == N * ROW
    assert PASS_KV.buffers == 2 * L / CP * ROW
    assert PASS_Q.buffers == N * (ROW + QUERY + INDEX)


def test_partials_are_merged_where_rows_travel_in_the_background() -> None:
    assert attention_bytes(GATHER) == 9_000
    assert attention_bytes(replace(GATHER, in_background=True)) == 10_000 + 1.5 * T * ROW
    assert attention_bytes(PASS_KV) == 10_000
    assert attention_bytes(replace(PASS_KV, selects_keys=True)) == 9_000 + L * ROW


def test_partials_of_all_queries_exist_while_they_are_sent_and_received() -> None:
    returning = N * PARTIAL * (2 - 1 / CP)
    assert attention_bytes(PASS_Q) == 9_000 + N * RESULT + returning
    # Queries may take more than what is sent.
    wide = replace(PASS_Q, query=500.0)
    assert attention_bytes(wide) == 9_000 + N * (500 + INDEX + RESULT)
    assert attention_bytes(replace(wide, expands_keys=True)) == 9_000 + N * (500 + INDEX + RESULT + PARTIAL)
    assert attention_bytes(replace(wide, selects_keys=True)) == 9_000 + N * (500 + INDEX + RESULT) - T * RESULT


@pytest.mark.parametrize(
    ("settings", "message", "expected"),
    [
        ({}, 5 << 20, 2 * (8 << 20)),
        ({}, 1 << 30, 2 * (64 << 20)),
        ({}, 0, 2),
        ({"resources": {"collectives": "tcp"}}, 5 << 20, 0),
        ({"resources": {"device": "cuda"}}, 5 << 20, 0),
    ],
)
def test_ranks_on_one_host_copy_messages_to_shared_memory(
    settings: dict[str, dict[str, str]], message: float, expected: float
) -> None:
    assert staging_bytes(DeployConfig.model_validate(settings), message) == expected
