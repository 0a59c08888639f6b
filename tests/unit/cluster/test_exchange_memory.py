"""Arithmetic of the memory that CP ranks take to exchange keys, values and queries."""

from dataclasses import replace

import pytest

from cluster.planner.exchange_memory import FormBytes, KvExchange, staging_bytes
from cluster.spec.config import DeployConfig
from cluster.spec.strategy import Passing

T, N, L, CP = 100, 400, 10_000, 4
ROW, QUERY, RESULT, PARTIAL, INDEX = 8, 32, 30, 60, 5
GATHER = KvExchange(
    cp=CP,
    num_tokens=T,
    chunk_tokens=N,
    longest=L,
    row=ROW,
    query=QUERY,
    partial=PARTIAL,
    index=INDEX,
    passing=None,
    in_background=False,
)
PASS_KV, PASS_Q = (replace(GATHER, passing=passing, in_background=True) for passing in Passing)
FORM = FormBytes(plain=9_000, merging=10_000, tile=0, query=QUERY, partial=PARTIAL, result=RESULT, selects_keys=False)
SELECTED = FORM._replace(selects_keys=True)


def test_buffers_hold_new_rows_or_two_blocks_or_all_queries() -> None:
    assert GATHER.buffers == N * ROW
    assert PASS_KV.buffers == 2 * L / CP * ROW
    assert PASS_Q.buffers == N * (ROW + QUERY + INDEX)


def test_partials_are_merged_where_rows_travel_in_the_background() -> None:
    assert GATHER.attention_bytes(FORM) == 9_000
    assert replace(GATHER, in_background=True).attention_bytes(FORM) == 10_000 + 1.5 * T * ROW
    assert PASS_KV.attention_bytes(FORM) == 10_000
    assert PASS_KV.attention_bytes(SELECTED) == 9_000 + L * ROW


def test_partials_of_all_queries_exist_while_they_are_sent_and_received() -> None:
    returning = N * PARTIAL * (2 - 1 / CP)
    assert PASS_Q.attention_bytes(FORM) == T * (QUERY + RESULT) + N * RESULT + returning
    assert PASS_Q.attention_bytes(FORM._replace(merging=50_000)) == 50_000 + returning
    assert PASS_Q.attention_bytes(FORM._replace(plain=1e9)) == 1e9


def test_queries_may_take_more_than_what_is_sent() -> None:
    own = T * (500 + RESULT)
    assert PASS_Q.attention_bytes(FORM._replace(query=500)) == own + N * (500 + RESULT)
    expanded = FORM._replace(query=500, tile=700)
    assert PASS_Q.attention_bytes(expanded) == own + N * (500 + RESULT + PARTIAL) + 700
    assert PASS_Q.attention_bytes(SELECTED._replace(query=500)) == T * 500 + N * (500 + INDEX + RESULT)


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
