"""Projections that CP ranks store together: who stores what, and which weight each layer multiplies by."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.spec.linear_shards import LinearShards
from cluster.spec.strategy import ShardLinear
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.loading_rank import groups_of
from tests.fakes.thread_group import on_thread_ranks
from workers.device import CPU
from workers.engine.weights import load_model
from workers.layers.linear import FusedLinear, SummedLinear
from workers.layers.projections import CpLinear, CpProjections, Projections, SplitLinear
from workers.layers.shard import Shard, ShardedLayer, replicated
from workers.models.decoder import DecoderModel
from workers.models.registry import read_model_config
from workers.parallel.communicator import Communicator

WAYS = [ShardLinear.BROADCAST, ShardLinear.GATHER]
IN_SIZE, HIDDEN, KV = 5, 7, 3

sizes = st.integers(1, 6)
ways = st.sampled_from(WAYS)


@given(ways, sizes, st.integers(1, 40), st.integers(1, 20))
def test_every_row_is_stored_once(way: ShardLinear, num_ranks: int, num_rows: int, num_layers: int) -> None:
    shards = LinearShards(way, num_ranks, ahead=1)
    for layer in range(num_layers):
        stored = list(itertools.chain(*(shards.stored_rows(num_rows, layer, rank) for rank in range(num_ranks))))
        assert stored == list(range(len(stored))), "ranks store consecutive rows"
        assert num_rows <= len(stored) == shards.buffer_rows(num_rows) < num_rows + num_ranks


@given(ways, sizes, st.integers(0, 4), st.integers(1, 40), st.integers(1, 20))
def test_memory_is_that_of_the_formula(
    way: ShardLinear, num_ranks: int, ahead: int, num_rows: int, num_layers: int
) -> None:
    shards = LinearShards(way, num_ranks, ahead)
    held = [shards.held_rows(num_rows, num_layers, rank) for rank in range(num_ranks)]
    assert max(held) == held[0]
    per_rank = -(-num_rows // num_ranks)
    if way is ShardLinear.BROADCAST:
        assert held[0] == num_rows * (-(-num_layers // num_ranks) + ahead + 1)
        assert sum(held) == num_rows * (num_layers + num_ranks * (ahead + 1))
    else:
        assert set(held) == {per_rank * num_layers + (ahead + 1) * num_ranks * per_rank}
    assert shards.received_rows(num_rows) == num_rows - (per_rank if way is ShardLinear.GATHER else 0)


class Stage:
    """Layers of one rank, built by one maker, and filled with the same values on every rank."""

    def __init__(self, projections: Projections, num_layers: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.queries: list[FusedLinear | SplitLinear] = []
        self.outputs: list[SummedLinear | CpLinear] = []
        heads = {"q": Shard(2 * HIDDEN, HIDDEN, HIDDEN), "k": replicated(KV)}
        for layer in range(num_layers):
            self.queries.append(projections.queries(layer, IN_SIZE, heads, bias=True))
            self.outputs.append(projections.output(layer, replicated(HIDDEN), IN_SIZE, bias=True))
            for module in (self.queries[-1], self.outputs[-1]):
                whole: dict[str, Tensor] = {}
                for name, shape in {"q": (2 * HIDDEN, IN_SIZE), "k": (KV, IN_SIZE), "": (IN_SIZE, HIDDEN)}.items():
                    prefix = f"{name}." if name else ""
                    whole[f"{prefix}weight"] = torch.randn(shape, generator=generator)
                    whole[f"{prefix}bias"] = torch.randn(shape[0], generator=generator)
                for linear in module.modules():
                    if isinstance(linear, ShardedLayer):
                        for name, shard in linear.weights():
                            part = shard.cleared()
                            assert isinstance(part, Tensor)
                            part.copy_(whole[name][shard.index])

    def step(self, x: Tensor) -> list[Tensor]:
        """Return the results of all layers. Half of them compute the first projection apart."""
        found = []
        for layer, (queries, output) in enumerate(zip(self.queries, self.outputs, strict=True)):
            if layer % 2:
                rest = queries.project(x, slice(HIDDEN, None))
                heads = torch.cat((queries.project(x, slice(HIDDEN)), rest), dim=-1)
            else:
                heads = queries(x)
            found += [heads, output(heads[:, :HIDDEN], lambda terms: terms)]
        return found


@settings(max_examples=40, deadline=None)
@given(ways, st.integers(2, 4), st.integers(0, 3), st.integers(1, 6), st.integers(1, 3))
def test_every_layer_uses_its_own_weights_in_every_step(
    way: ShardLinear, num_ranks: int, ahead: int, num_layers: int, num_steps: int
) -> None:
    with torch.no_grad():
        inputs = [torch.randn(step, IN_SIZE) for step in range(num_steps)]
        plain = Stage(Projections(), num_layers)
        expected = [plain.step(x) for x in inputs]

        def compute(group: Communicator) -> list[list[Tensor]]:
            stage = Stage(CpProjections(LinearShards(way, num_ranks, ahead), group), num_layers)
            found, times = [], group.rank
            with torch.no_grad():
                for x in inputs:
                    found.append(stage.step(x))
                    with group.alone():  # as often as each rank likes, and without an effect
                        for _ in range(times):
                            stage.queries[0](x)
            return found

        for found in on_thread_ranks(num_ranks, compute):
            torch.testing.assert_close(found, expected)


def test_a_weight_stays_until_the_next_layer_takes_its_own() -> None:
    def check(group: Communicator) -> None:
        stage = Stage(CpProjections(LinearShards(ShardLinear.BROADCAST, 2, ahead=1), group), 3)
        modules = [module for pair in zip(stage.queries, stage.outputs, strict=True) for module in pair]
        linears = [each for module in modules for each in module.modules() if isinstance(each, CpLinear)]
        held: dict[int, tuple[Tensor, Tensor]] = {}
        for number, linear in enumerate(linears * 3):
            for weight, before in held.values():
                assert torch.equal(weight, before)
            weight = linear._exchange.take(linear)
            held[number % 2] = weight, weight.clone()

    on_thread_ranks(2, check)


def test_projections_are_taken_in_the_order_of_use() -> None:
    def check(group: Communicator) -> None:
        stage = Stage(CpProjections(LinearShards(ShardLinear.GATHER, 2, ahead=0), group), 2)
        with torch.no_grad(), pytest.raises(AssertionError, match="in another order"):
            stage.outputs[0](torch.zeros(1, HIDDEN))

    on_thread_ranks(2, check)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm_moe_dsa"])
def test_a_rank_reads_only_what_it_stores(tmp_path: Path, family: str, way: ShardLinear) -> None:
    shape = {"num_hidden_layers": 4, "q_lora_rank": None} if family == "deepseek_v2" else {"num_hidden_layers": 4}
    folder, cp = make_checkpoint(tmp_path / "model", family, **shape), 3
    whole = load_model(folder).weights()
    divided = {name for name in whole if name.endswith(("q_proj.weight", "q_b_proj.weight", "o_proj.weight"))}
    read: dict[str, list[Tensor]] = {name: [] for name in divided}
    for rank in range(cp):
        model = load_model(folder, groups=groups_of({"cp": cp}, rank, LinearShards(way, cp, ahead=1)))
        weights = model.weights()
        assert weights.keys() - divided == whole.keys() - divided
        for name in weights.keys() & divided:
            read[name].append(weights[name].plain)
    for name, parts in read.items():
        assert len(parts) == (cp if way is ShardLinear.GATHER else 1)
        assert torch.equal(torch.cat(parts)[: len(whole[name].plain)], whole[name].plain)


def test_layers_of_each_stage_are_counted_from_its_first(tmp_path: Path) -> None:
    config = read_model_config(make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=5))
    axes, shards = {"cp": 2, "pp": 2}, LinearShards(ShardLinear.BROADCAST, 2, ahead=0)
    stored = []
    for rank in range(4):
        with torch.device("meta"):
            groups = groups_of(axes, rank, shards)
            model = DecoderModel(config, dtype=torch.float32, device=CPU, groups=groups)
        stored.append(sorted(int(name.split(".")[2]) for name in model.weights() if name.endswith("o_proj.weight")))
    assert stored == [[0], [1], [2, 4], [3]]
