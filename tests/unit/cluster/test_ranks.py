"""Rank arithmetic compared with brute force and worked examples."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cluster.spec.config import ParallelConfig
from cluster.spec.ranks import (
    GroupName,
    axis_problems,
    coords_of,
    global_rank,
    groups,
    head_copy_groups,
    kv_heads_of,
    moe_tp_size,
    positions,
    sizes_of,
    stage_layers,
    stage_links,
    world_size,
)
from cluster.spec.registry import AxisSizes, RankCoords

Fields = dict[str, int]


def legal(parallel: ParallelConfig) -> bool:
    return not axis_problems(parallel, "x")


sizes = st.integers(1, 4)
parallels = st.builds(
    ParallelConfig,
    dp=sizes,
    cp=sizes,
    tp=sizes,
    pp=st.integers(1, 3),
    moe_dp=sizes,
    ep=st.sampled_from((1, 2, 4, 8)),
)
legal_parallels = parallels.filter(legal)


def brute_force_ranks(parallel: ParallelConfig) -> list[Fields]:
    """Count through the axes in order, the last one fastest: once for attention and once for experts."""
    moe_tp = parallel.dp * parallel.cp * parallel.tp // (parallel.moe_dp * parallel.ep)
    attention = itertools.product(*map(range, (parallel.pp, parallel.dp, parallel.cp, parallel.tp)))
    experts = itertools.product(*map(range, (parallel.pp, parallel.moe_dp, parallel.ep, moe_tp)))
    return [
        {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "moe_dp": moe_dp, "ep": ep, "moe_tp": moe_tp_rank}
        for (pp, dp, cp, tp), (_, moe_dp, ep, moe_tp_rank) in zip(attention, experts, strict=True)
    ]


def brute_force_groups(ranks: list[Fields], varying: str, alike: tuple[str, ...]) -> list[list[int]]:
    """Return the ranks of each group, which are equal on the ``alike`` axes."""
    found = members_alike(ranks, alike)
    for members in found:
        assert [ranks[rank][varying] for rank in members] == list(range(len(members)))
    return found


def members_alike(ranks: list[Fields], alike: tuple[str, ...]) -> list[list[int]]:
    found: list[list[int]] = []
    for mine in ranks:
        members = [rank for rank, other in enumerate(ranks) if all(mine[axis] == other[axis] for axis in alike)]
        if members not in found:
            found.append(members)
    return found


@settings(max_examples=60, deadline=None)
@given(legal_parallels)
def test_positions_equal_counting(parallel: ParallelConfig) -> None:
    expected = brute_force_ranks(parallel)
    found = positions(parallel)
    assert [rank.global_rank for rank in found] == list(range(len(expected)))
    for rank, fields in zip(found, expected, strict=True):
        assert {axis: getattr(rank, axis) for axis in fields} == fields


@settings(max_examples=60, deadline=None)
@given(legal_parallels)
def test_groups_equal_brute_force(parallel: ParallelConfig) -> None:
    ranks = brute_force_ranks(parallel)
    assert groups(parallel) == {
        "attn_tp": brute_force_groups(ranks, "tp", ("pp", "dp", "cp")),
        "attn_cp": brute_force_groups(ranks, "cp", ("pp", "dp", "tp")),
        "attn_dp": brute_force_groups(ranks, "dp", ("pp", "cp", "tp")),
        "moe_dp": brute_force_groups(ranks, "moe_dp", ("pp", "ep", "moe_tp")),
        "moe_ep": brute_force_groups(ranks, "ep", ("pp", "moe_dp", "moe_tp")),
        "moe_tp": brute_force_groups(ranks, "moe_tp", ("pp", "moe_dp", "ep")),
        "moe_block": members_alike(ranks, ("pp", "moe_dp")),
        "moe_shards": members_alike(ranks, ("pp", "moe_dp", "tp")),
        "pp": brute_force_groups(ranks, "pp", ("dp", "cp", "tp")),
    }


@settings(max_examples=60, deadline=None)
@given(legal_parallels)
def test_experts_are_fed_by_whole_attention_shards(parallel: ParallelConfig) -> None:
    """An expert group gets tokens from dp * cp / moe_dp shards, and each tp_rank exchanges them with its own kind."""
    ranks, found = positions(parallel), groups(parallel)
    num_shards = parallel.dp * parallel.cp // parallel.moe_dp
    for block in found[GroupName.MOE_BLOCK]:
        shards = [
            [(ranks[rank].dp, ranks[rank].cp) for rank in block if ranks[rank].tp == tp] for tp in range(parallel.tp)
        ]
        assert all(shard == shards[0] and len(set(shard)) == num_shards for shard in shards)
    assert {len(members) for members in found[GroupName.MOE_SHARDS]} == {num_shards}


@settings(max_examples=200, deadline=None)
@given(parallels, st.data())
def test_coordinates_and_ranks_are_inverse(parallel: ParallelConfig, data: st.DataObject) -> None:
    axes = sizes_of(parallel)
    rank = data.draw(st.integers(0, world_size(axes) - 1))
    coords = coords_of(rank, axes)
    assert global_rank(coords, axes) == rank
    stage = axes.dp * axes.cp * axes.tp
    assert rank == coords.pp * stage + (coords.dp * axes.cp + coords.cp) * axes.tp + coords.tp


@pytest.mark.parametrize(
    ("parallel", "name", "expected"),
    [
        (ParallelConfig(cp=2, tp=4), "attn_tp", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (ParallelConfig(cp=2, tp=4), "attn_cp", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (ParallelConfig(dp=2, cp=4), "attn_cp", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (ParallelConfig(dp=2, cp=2, tp=2), "attn_cp", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (ParallelConfig(dp=2, cp=2, tp=2), "attn_dp", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (ParallelConfig(cp=2, tp=4, ep=4, moe_dp=2), "moe_ep", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (ParallelConfig(cp=2, tp=4, ep=4, moe_dp=2), "moe_dp", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (ParallelConfig(cp=2, tp=4, ep=4, moe_dp=2), "moe_tp", [[rank] for rank in range(8)]),
        (ParallelConfig(tp=8, ep=4), "moe_ep", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (ParallelConfig(tp=8, ep=4), "moe_tp", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (ParallelConfig(tp=2, pp=3), "pp", [[0, 2, 4], [1, 3, 5]]),
        (ParallelConfig(tp=2, pp=2), "attn_tp", [[0, 1], [2, 3]]),
    ],
)
def test_worked_examples(parallel: ParallelConfig, name: str, expected: list[list[int]]) -> None:
    assert groups(parallel)[GroupName(name)] == expected


@pytest.mark.parametrize(("rank", "expected"), [(0, [(0, 2)]), (1, [(1, 3)]), (2, [(0, 2), (2, 4)]), (5, [(3, 5)])])
def test_hidden_states_go_to_the_same_coordinates_in_the_next_stage(rank: int, expected: list[tuple[int, int]]) -> None:
    assert stage_links(ParallelConfig(tp=2, pp=3), rank) == expected


@settings(max_examples=300, deadline=None)
@given(parallels)
def test_legality_equals_the_rules(parallel: ParallelConfig) -> None:
    stage = parallel.dp * parallel.cp * parallel.tp
    divides = stage % (parallel.moe_dp * parallel.ep) == 0
    same_copies = parallel.moe_dp == 1 or parallel.moe_dp == parallel.cp
    one_stage = parallel.moe_dp == 1 or parallel.pp == 1
    assert legal(parallel) == (divides and same_copies and one_stage)


def test_expert_tensor_parallel_size_fills_the_stage() -> None:
    assert moe_tp_size(ParallelConfig(dp=2, cp=2, tp=4, ep=2, moe_dp=2)) == 4


@pytest.mark.parametrize(
    ("coords", "message"),
    [
        (RankCoords(dp=0, cp=2, tp=0, pp=0), "cp_rank 2 is out of range; allowed: 0 to 1"),
        (RankCoords(dp=0, cp=0, tp=-1, pp=0), "tp_rank -1 is out of range; allowed: 0 to 0"),
    ],
)
def test_coordinates_outside_their_axis_are_refused(coords: RankCoords, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        global_rank(coords, AxisSizes(dp=1, cp=2, tp=1, pp=1))


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_its_replica_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"global rank {rank} is outside its replica; allowed: 0 to 1"):
        coords_of(rank, AxisSizes(dp=1, cp=2, tp=1, pp=1))


@given(st.integers(1, 100), st.integers(1, 16))
def test_stages_hold_every_layer_once_and_differ_by_one_at_most(num_layers: int, pp_size: int) -> None:
    stages = [stage_layers(num_layers, pp_size, pp_rank) for pp_rank in range(pp_size)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    lengths = [len(stage) for stage in stages]
    assert lengths == sorted(lengths)
    assert max(lengths) - min(lengths) <= 1


@given(st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4, 8, 16)))
def test_every_head_is_held_and_shared_only_by_neighbours(num_heads: int, tp_size: int) -> None:
    held = [head for tp_rank in range(tp_size) for head in kv_heads_of(num_heads, tp_size, tp_rank)]
    copies = max(1, tp_size // num_heads)
    assert held == [head for head in range(num_heads) for _ in range(copies)]


@settings(max_examples=200, deadline=None)
@given(legal_parallels, st.sampled_from((1, 2, 3, 4, 8, 12)))
def test_groups_of_head_copies_hold_the_same_heads_of_the_same_tokens_and_layers(
    parallel: ParallelConfig, num_heads: int
) -> None:
    assume(num_heads % parallel.tp == 0 or parallel.tp % num_heads == 0)
    held: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world_size(sizes_of(parallel))):
        coords = coords_of(rank, sizes_of(parallel))
        heads = kv_heads_of(num_heads, parallel.tp, coords.tp)
        held.setdefault((coords.pp, coords.dp, coords.cp, *heads), []).append(rank)
    assert head_copy_groups(positions(parallel), [num_heads]) == sorted(held.values())


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 KV heads cannot be divided among tp = 4 ranks; one number must divide"):
        kv_heads_of(6, 4, 0)
