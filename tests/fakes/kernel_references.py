"""Comparison of the small kernels with plain torch on any device."""

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.fakes.fp8_products import FP8_CHECKS
from tests.fakes.kernel_cases import DTYPES, Wanted, compare
from tests.fakes.kv import kv_pool
from tests.fakes.nearness import check_near
from tests.fakes.selection_references import SELECTION_CHECKS
from workers.attention.merge import Partial, merge_into
from workers.device import device_between
from workers.expert_parallel.token_dispatcher import NO_EXPERT, order_by_expert
from workers.kernels.attention import attend, blocks_for
from workers.kernels.copy_pages import copy_pages
from workers.kernels.experts import choose_experts, expert_rows, grouped_matmul, sum_choices, tiles_of
from workers.kernels.partials import Parts, merge_partial
from workers.kernels.triton_elementwise import add_rms_norm, rms_norm, rotate, rotate_storing, store_kv, swiglu
from workers.layers.linear import RMSNorm
from workers.layers.rotary import Rotation

NUM_ROWS = st.sampled_from([0, 1, 2, 5, 17])


def check_store(data: st.DataObject, device: str) -> None:
    page_size, heads, dim = data.draw(st.sampled_from([(16, 2, 64), (64, 1, 80), (5, 3, 16)]))
    num_rows, dtype = data.draw(NUM_ROWS), data.draw(DTYPES)
    pools = [kv_pool(4, heads, 3, page_size, dim, dtype) for _ in range(2)]
    slots = torch.randperm(4 * page_size)[:num_rows]
    kv = torch.randn(num_rows, heads, 2, dim).to(dtype)
    pools[0].write(1, slots, kv.view(num_rows, heads, 2 * dim))
    written = pools[1].group("full_attention").to(device)
    store_kv(written[:, :, 1], slots.to(device), kv.transpose(1, 2).to(device))
    assert torch.equal(written.cpu(), pools[0].group("full_attention"))


def check_copy(data: st.DataObject, device: str) -> None:
    heads, layers = data.draw(
        st.sampled_from([(slice(0, 4), slice(0, 3)), (slice(1, 3), slice(0, 3)), (slice(2, 3), slice(1, 3))])
    )
    pool = kv_pool(6, 4, 3, data.draw(st.sampled_from([4, 16])), 8, data.draw(DTYPES))
    pool.group("full_attention").copy_(torch.randn(pool.group("full_attention").shape))
    count = data.draw(st.integers(0, 6))
    indices = torch.stack([torch.randperm(6)[:count], torch.randperm(7)[:count]])
    expected = torch.zeros_like(pool.group("full_attention"))
    expected[:, heads, layers][indices[1]] = pool.group("full_attention")[indices[0]][:, heads, layers]
    on_host = pool.group("full_attention").pin_memory() if device == "cuda" else pool.group("full_attention")
    there, zeros = pool.group("full_attention").to(device), torch.zeros_like(pool.group("full_attention"))
    for source, target in (
        (there, zeros.to(device)),
        (on_host, zeros.to(device)),
        (there, zeros.pin_memory() if device == "cuda" else zeros),
    ):
        copy_pages(source[:, heads, layers], target[:, heads, layers], indices.to(device))
        # A copy to the host does not synchronize by itself.
        device_between(source, target).synchronize()
        assert torch.equal(target.cpu(), expected)


def check_norm(data: st.DataObject, device: str) -> None:
    dtype, size = data.draw(DTYPES), data.draw(st.sampled_from([1, 96, 128, 1000]))
    x, y = (torch.randn(data.draw(NUM_ROWS), 2 * size).to(dtype)[:, :size] for _ in range(2))
    y = x.flip(0) if len(x) != len(y) else y
    norm = RMSNorm(size, 1e-6)
    norm.weight.data = torch.randn(size).to(dtype)
    total = x + y
    x_, y_, weight = (tensor.to(device) for tensor in (x, y, norm.weight))
    found_total, found = add_rms_norm(x_, y_, weight, norm.eps)
    assert torch.equal(found_total.cpu(), total)
    normed, normed_total = (_normed(norm, each) for each in (x, total))
    check_near(rms_norm(x_, weight, norm.eps), *normed)
    check_near(found, *normed_total)


def _normed(norm: RMSNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm in fp64, and with rounding to the dtype of ``x`` before and after the scale."""
    wide = x.double()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    scale = norm.weight.double()
    return scale * wide, (scale * wide.to(x.dtype).double()).to(x.dtype)


def _rope_dims(dim: int) -> st.SearchStrategy[int]:
    """Return even sizes of the rotated part of a head."""
    return st.sampled_from([dim, dim // 4 * 2 or dim, 2])


def check_rotate(data: st.DataObject, device: str) -> None:
    dtype, dim = data.draw(DTYPES), data.draw(st.sampled_from([2, 64, 80, 128, 256]))
    num_tokens, heads = data.draw(NUM_ROWS), data.draw(st.sampled_from([1, 3, 9]))
    x = torch.randn(num_tokens, 2 * heads, dim).to(dtype)[:, :heads]
    rope_dim = data.draw(_rope_dims(dim))
    cos, sin = (torch.randn(num_tokens, 1, rope_dim).to(dtype) for _ in range(2))
    norm = RMSNorm(dim, 1e-6)
    norm.weight.data = torch.randn(dim).to(dtype)
    x_, cos_, sin_, weight_ = (tensor.to(device) for tensor in (x, cos, sin, norm.weight))
    rotation = Rotation(cos.double(), sin.double())
    check_near(rotate(x_, cos_, sin_), rotation.apply(x.double()))
    check_near(rotate(x_, cos_, sin_, weight_, norm.eps), rotation.apply(norm.double()(x.double())))


def check_rotate_storing(data: st.DataObject, device: str) -> None:
    """Check rotation like ``rotate``. Values and all other slots must stay unchanged."""
    dtype, (dim, page_size) = data.draw(DTYPES), data.draw(st.sampled_from([(2, 5), (80, 16), (128, 64)]))
    queries, stored = data.draw(st.sampled_from([1, 4, 9])), data.draw(st.integers(1, 3))
    slots = torch.randperm(4 * page_size)[: data.draw(NUM_ROWS)]
    heads = torch.randn(len(slots), queries + 2 * stored, dim).to(dtype)
    rope_dim = data.draw(_rope_dims(dim))
    cos, sin = (torch.randn(len(slots), 1, rope_dim).to(dtype) for _ in range(2))
    norms = [RMSNorm(dim, 1e-6) for _ in range(2)]
    for norm in norms:
        norm.weight.data = torch.randn(dim).to(dtype)
    rotation, (q, k, v) = Rotation(cos.double(), sin.double()), torch.split(heads, [queries, stored, stored], dim=1)
    of_q, of_k = (norm.weight.to(device) for norm in norms)
    pages, indices = torch.zeros(5, stored, 3, 2, page_size, dim, dtype=dtype), (slots // page_size, slots % page_size)
    for weights, (q_norm, k_norm) in ((None, (None, None)), ((of_q, of_k), norms)):
        there = pages.to(device)
        turn = heads.to(device), cos.to(device), sin.to(device)
        found = rotate_storing(*turn, weights, 1e-6, there[:, :, 1], slots.to(device))
        written = there.cpu()
        rows = written[:, :, 1].permute(0, 3, 2, 1, 4)[indices]
        for rotated, given, by in ((found, q, q_norm), (rows[:, 0], k, k_norm)):
            wide = given.double()
            check_near(rotated, rotation.apply(wide if by is None else by.double()(wide)))
        assert torch.equal(rows[:, 1], v)
        written[:, :, 1].permute(0, 3, 2, 1, 4)[indices] = 0
        assert not written.any()


def check_swiglu(data: st.DataObject, device: str) -> None:
    gate_up = torch.randn(data.draw(NUM_ROWS), 2 * data.draw(st.sampled_from([1, 100, 1500]))).to(data.draw(DTYPES)) * 4
    gate, up = gate_up.double().chunk(2, dim=1)
    check_near(swiglu(gate_up.to(device)), functional.silu(gate) * up)


def check_grouped(data: st.DataObject, device: str) -> None:
    counts = data.draw(st.lists(st.sampled_from([0, 1, 3, 16, 70]), min_size=1, max_size=4))
    inner, cols, dtype = data.draw(st.sampled_from([8, 100])), data.draw(st.sampled_from([16, 130])), data.draw(DTYPES)
    x, weights = torch.randn(sum(counts), inner).to(dtype), torch.randn(len(counts), cols, inner).to(dtype)
    parts = [rows.double() @ matrix.double().T for rows, matrix in zip(torch.split(x, counts), weights, strict=True)]
    x = x.to(device)
    tiles = tiles_of(counts, x)
    check_near(grouped_matmul(x, weights.to(device), tiles), torch.cat(parts))


def check_choices(data: st.DataObject, device: str) -> None:
    """Check the choice of experts. Among equal ones any may be first, and tokens without a count are also valid."""
    num_tokens, num_experts = data.draw(NUM_ROWS), data.draw(st.sampled_from([1, 8, 60, 128]))
    num_chosen, dtype = min(data.draw(st.sampled_from([1, 2, 8])), num_experts), data.draw(DTYPES)
    logits = torch.randn(num_tokens, num_experts).to(dtype) * 3
    counted = data.draw(st.sampled_from([None, torch.rand(num_tokens, 1) < 0.7]))
    sum_to_one = data.draw(st.booleans())
    there = None if counted is None else counted.to(device)
    experts, weights = choose_experts(logits.to(device), num_chosen, there, sum_to_one=sum_to_one)
    likelihoods = logits.double().softmax(-1)
    best = likelihoods.topk(num_chosen).values
    check_near(weights, best / best.sum(-1, keepdim=True) if sum_to_one else best)
    chosen, is_counted = experts.cpu().long(), torch.ones(num_tokens, 1) > 0 if counted is None else counted
    assert chosen[~is_counted[:, 0]].eq(NO_EXPERT).all()
    of_chosen = likelihoods.gather(1, chosen.clamp(min=0))
    torch.testing.assert_close(of_chosen[is_counted[:, 0]], best[is_counted[:, 0]])
    assert all(len(set(row)) == num_chosen for row in chosen[is_counted[:, 0]].tolist())
    if device != "cpu":  # where interpreting it is an error
        nan = torch.full((1, num_experts), torch.nan).to(device)
        chosen, _ = choose_experts(nan, num_chosen, None, sum_to_one=False)
        assert ((chosen >= 0) & (chosen < num_experts)).all()


def check_expert_rows(data: st.DataObject, device: str) -> None:
    """Check tokens with fewer experts than others and with experts on other ranks."""
    num_tokens, num_chosen = data.draw(st.sampled_from([1, 5, 33, 300])), data.draw(st.sampled_from([1, 2, 8]))
    first, num_local = data.draw(st.sampled_from([(0, 16), (4, 8), (12, 4), (8, 1)]))
    chosen = torch.rand(num_tokens, 16).argsort(1)[:, :num_chosen]
    experts = torch.where(torch.rand(chosen.shape) < 0.1, NO_EXPERT, chosen).to(torch.int32)
    loads = torch.full((num_local,), 5).to(device)
    tokens, rows, tiles = expert_rows(experts.to(device), first, loads, 16)
    order, counts = order_by_expert(experts, first, num_local)
    assert loads.tolist() == [5 + count for count in counts]
    assert torch.equal(tokens[: len(order)].cpu(), (order // num_chosen).to(torch.int32))
    expected = torch.full((num_tokens * num_chosen,), -1, dtype=torch.int32)
    expected[order] = torch.arange(len(order), dtype=torch.int32)
    assert torch.equal(rows.flatten().cpu(), expected)
    stops = torch.tensor(counts).cumsum(0).tolist()
    used = [
        [expert, begin, stop]
        for expert, (stop, count) in enumerate(zip(stops, counts, strict=True))
        for begin in range(stop - count, stop, 16)
    ]
    used += [[-1, begin, experts.numel()] for begin in range(len(order), experts.numel(), 16)]
    assert tiles.tiles.tolist() == used + [[-1, *[experts.numel()] * 2]] * (len(tiles.tiles) - len(used))
    x, weights = torch.randn(num_tokens, 8), torch.randn(num_local, 16, 8)
    gates = torch.rand(num_tokens, num_chosen)
    answers = grouped_matmul(x.to(device), weights.to(device), tiles, tokens)
    assert not answers[len(order) :].any()
    wanted = torch.zeros(num_tokens, 16, dtype=torch.double)
    for index, expert in zip(order.tolist(), torch.repeat_interleave(torch.tensor(counts)).tolist(), strict=True):
        token, choice = divmod(index, num_chosen)
        wanted[token] += gates[token, choice].double() * (weights[expert].double() @ x[token].double())
    check_near(sum_choices(answers, rows, gates.to(device)), wanted)


COMPILED_PARTS = ((1, 1, 64), (2, 3, 80), (8, 4, 128), (1, 16, 256), (2, 5, 96))
"""KV heads, groups and head sizes. A GPU compiles a kernel for each of them."""
_MOST_INTERPRETED = 100
"""Limit on programs in large or repeated launches, because the interpreter runs sixty a second."""


def check_joined_parts(data: st.DataObject, device: str) -> None:
    """Check three tiles with parts in any order. Parts may be empty, and other slots are not read."""
    most = [2, 7, 20, 64, 65, 66] if device == "cpu" else [2, 7, 20, 64, 65, 66, 130, 264]
    counts = [data.draw(st.sampled_from(most)), 1, data.draw(st.integers(2, 6))]
    if device == "cpu":
        kv_heads = data.draw(st.integers(1, max(_MOST_INTERPRETED // sum(counts), 1)))
        groups, dim = data.draw(st.integers(1, 16)), data.draw(st.sampled_from([64, 80, 96, 128, 256]))
    else:
        kv_heads, groups, dim = data.draw(st.sampled_from(COMPILED_PARTS))
    num_queries = data.draw(st.integers(1, min(32 // groups, 4)))
    step = num_queries + data.draw(st.sampled_from([0, 0, 1, 3]))
    dtype = data.draw(DTYPES)
    lens = torch.randint(0, 3, (sum(counts),))
    key, value = torch.randn(2, max(int(lens.sum()), 1), kv_heads, dim).to(dtype)
    query = torch.randn(num_queries * len(counts), kv_heads * groups, dim).to(dtype)
    tiles, segments = _tiles_of_parts(counts, lens.tolist(), num_queries, step)
    seen = np.repeat(np.arange(len(counts)), num_queries)[:, None] == np.repeat(np.arange(len(counts)), counts)
    expected = Wanted.of(query, key[: lens.sum()], value[: lens.sum()], np.repeat(seen, lens, axis=1), lens.tolist())
    arrived = torch.zeros(step * len(lens), kv_heads, dtype=torch.int32).to(device)
    results = []
    for _ in range(2 if device != "cpu" or len(lens) * kv_heads <= _MOST_INTERPRETED else 1):
        found = torch.full((len(arrived), kv_heads * groups, dim), torch.nan).to(device)
        result = Partial(torch.full(query.shape, torch.nan, dtype=dtype).to(device), found[: len(query), :, 0].clone())
        attend(
            query.to(device),
            key.transpose(0, 1)[None].to(device),
            value.transpose(0, 1)[None].to(device),
            *result,
            tiles=tiles[torch.randperm(len(tiles))].to(device),
            segments=segments.to(device),
            tables=torch.zeros(1, dtype=torch.int64).to(device),
            page_size=0,
            blocks=blocks_for(num_queries, groups, head_dim=dim, value_dim=dim, itemsize=dtype.itemsize, page_size=0),
            scale=dim**-0.5,
            parts=Parts(found, found[:, :, 0].clone(), arrived),
        )
        assert not arrived.any()
        compare(result, expected, dtype)
        results.append(result)
    assert torch.equal(results[0].out, results[-1].out)
    assert torch.equal(results[0].lse, results[-1].lse)


def _tiles_of_parts(counts: list[int], lens: list[int], num_queries: int, step: int) -> tuple[Tensor, Tensor]:
    """Return tiles with a number of parts each, and segments with the length of each part."""
    tiles: list[list[int]] = []
    segments, first_slot = [], 0
    for tile, count in enumerate(counts):
        for part in range(count):
            at = len(tiles)
            tiles.append([tile * num_queries, num_queries, 0, at, 1, part, count, first_slot, step])
            segments.append([0, sum(lens[:at]), 0, lens[at], lens[at], 0])
        first_slot += step * count
    return torch.tensor(tiles, dtype=torch.int32), torch.tensor(segments, dtype=torch.int32)


def check_merged_partials(data: st.DataObject, device: str) -> None:
    """Check the partial results of up to six ranks, in any dtypes."""
    shape = data.draw(st.sampled_from([(0, 1), (1, 3), (9, 2)]))
    dim, dtypes = data.draw(st.sampled_from([64, 80, 256])), data.draw(st.lists(DTYPES, min_size=1, max_size=5))
    dtypes = [torch.float32, *dtypes]
    outs, lses = [torch.randn(*shape, dim).to(each) for each in dtypes], [torch.randn(shape) for _ in dtypes]
    for out, lse in zip(outs, lses, strict=True):
        is_empty = torch.rand(shape) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
        out[is_empty], lse[is_empty] = 0, -torch.inf
    expected = _merged_in_double([Partial(out, lse) for out, lse in zip(outs, lses, strict=True)])
    joined, *others = [Partial(out.to(device), lse.to(device)) for out, lse in zip(outs, lses, strict=True)]
    for other in others:
        merge_partial(*joined, *other)
    compare(joined, Wanted(*expected, expected.out.float()), torch.float32)


def _merged_in_double(parts: list[Partial]) -> Partial:
    joined, *others = [Partial(part.out.double(), part.lse.double()) for part in parts]
    for other in others:
        merge_into(joined, other)
    return joined


CHECKS = (
    check_store,
    check_copy,
    check_norm,
    check_rotate,
    check_rotate_storing,
    check_swiglu,
    check_grouped,
    check_choices,
    check_expert_rows,
    check_joined_parts,
    check_merged_partials,
    *SELECTION_CHECKS,
    *FP8_CHECKS,
)
