"""Rank process of `baton bench cp`, which runs single prefill steps of a model with random weights."""

import dataclasses
import random
import time
from operator import sub

from msgspec.structs import replace

from cluster.spec.config import AttentionSetting, ParallelConfig
from cluster.spec.ids import Room
from cluster.spec.kv import pages_for
from cluster.spec.linear_shards import LinearShards
from cluster.spec.registry import KvOwnership
from cluster.spec.sampling import Sampling
from cluster.spec.step_messages import NewRequest, StepPlan
from cluster.spec.strategy import Collectives, CpMode, ShardLinear, StrategySetting
from workers.bench.results import StepTime, Way
from workers.context_parallel.shard_plan import dummy_request
from workers.context_parallel.strategy_chooser import StrategyChoice, StrategyChooser
from workers.device import CPU, use_cpu
from workers.engine.calibration import calibrate, shape_of
from workers.engine.native_kernels import choose_kernels
from workers.engine.rank_groups import RankGroups
from workers.engine.runner import ModelRunner
from workers.engine.warm_up import warm_up
from workers.engine.weights import random_model, torch_dtype
from workers.memory.page_pool import PagePool
from workers.models.decoder import DecoderModel
from workers.models.interface import DecoderConfig
from workers.parallel.communicator import Communicator
from workers.parallel.groups import join_group
from workers.parallel.model_groups import ModelGroups
from workers.parallel.store import ReplicaStore, join_store, open_store

_HOST = "127.0.0.1"
_TIMEOUT_S = 600.0
_PAGE_SIZE = 64


class CpBenchRank:
    """Model on one rank, which joins one group for each CP size to measure."""

    def __init__(
        self,
        config: DecoderConfig,
        max_len: int,
        mode: CpMode,
        shard_linear: ShardLinear = ShardLinear.NONE,
        collectives: Collectives = Collectives.AUTO,
    ) -> None:
        use_cpu(1)
        self._config, self._mode, self._shard_linear, self._collectives = config, mode, shard_linear, collectives
        self._model = self._make_model(ModelGroups())
        geometry = config.kv_geometry("bench", config.dtype, _PAGE_SIZE)
        self._pool = PagePool.of_one_rank(geometry, pages_for(max_len, _PAGE_SIZE))
        self._backend = choose_kernels(AttentionSetting.AUTO, self._model, geometry).backend
        self._store: ReplicaStore | None = None
        self._groups: dict[int, tuple[RankGroups, ModelRunner, StrategyChooser]] = {}

    def open_store(self) -> str:
        """Open the store through which the ranks form groups. Return its ``host:port``."""
        self._store, port = open_store(_HOST, _TIMEOUT_S)
        return f"{_HOST}:{port}"

    def join(self, store: str, rank: int, cp: int) -> None:
        """Form a group of the first ``cp`` ranks, warm up and measure rates."""
        if self._store is None:
            self._store = join_store(store, _TIMEOUT_S)
        model = self._model
        if (divided := self._model_groups(rank, cp)) is not None:
            model = self._make_model(divided)
        groups = RankGroups(cp=self._join_group(f"cp{cp}", rank, cp), model=model.groups)
        is_sharded = self._mode is CpMode.RING and cp > 1
        ownership = KvOwnership.SHARDED if is_sharded else KvOwnership.REPLICATED
        runner = ModelRunner(model, self._pool, self._backend, groups, ownership)
        warm_up(runner)
        shape = shape_of(model, self._config.dtype)
        rates = calibrate(model, self._pool, self._backend, groups.cp, shape)
        chooser = StrategyChooser(setting=StrategySetting.AUTO, cp=cp, shape=shape, rates=rates, mode=self._mode)
        self._groups[cp] = groups, runner, chooser

    def choose(self, way: Way, prompt_len: int, prefix_len: int) -> StrategyChoice:
        """Return how to run a step, based on this rank's measured rates. Rank 0 decides for all ranks."""
        _, _, chooser = self._groups[way.cp]
        return dataclasses.replace(chooser, setting=way.strategy)([dummy_request(prompt_len, prefix_len)])

    def step(self, way: Way, choice: StrategyChoice, prompt_len: int, prefix_len: int) -> StepTime:
        """Compute a prompt up to its first token in one step of the first ``way.cp`` ranks."""
        plan = self._plan(choice, prompt_len, prefix_len)
        groups, runner, _ = self._groups[way.cp]
        groups.cp.barrier()
        before_s, before_bytes, start_s = _waits_s(groups), _received_bytes(groups), time.perf_counter()
        runner.begin(plan).wait()
        seconds = time.perf_counter() - start_s
        waited_s, projections_s = map(sub, _waits_s(groups), before_s)
        return StepTime(seconds, waited_s, projections_s, _received_bytes(groups) - before_bytes)

    def close(self) -> None:
        for groups, _, _ in self._groups.values():
            groups.leave()

    def _model_groups(self, rank: int, cp: int) -> ModelGroups | None:
        """Join the groups over which weights are divided. None if every rank holds all weights."""
        has_experts, has_shards = bool(self._config.experts_per_token), self._shard_linear is not ShardLinear.NONE
        if cp == 1 or not (has_experts or has_shards):
            return None
        groups = ModelGroups(parallel=ParallelConfig(cp=cp, ep=cp if has_experts else 1), global_rank=rank)
        if has_experts:
            experts = self._join_group(f"experts{cp}", rank, cp)
            groups = dataclasses.replace(groups, moe_shards=experts, moe_block=experts)
        if has_shards:
            projections = self._join_group(f"projections{cp}", rank, cp)
            shards = LinearShards(self._shard_linear, cp)
            groups = dataclasses.replace(groups, projections=projections, linear_shards=shards)
        return groups

    def _make_model(self, groups: ModelGroups) -> DecoderModel:
        return random_model(self._config, torch_dtype(self._config.dtype), CPU, groups)

    def _join_group(self, name: str, rank: int, cp: int) -> Communicator:
        assert self._store is not None
        by = self._collectives
        return join_group(self._store, name, range(cp), rank, host=_HOST, timeout_s=_TIMEOUT_S, collectives=by)

    def _plan(self, choice: StrategyChoice, prompt_len: int, prefix_len: int) -> StepPlan:
        rng, total_len = random.Random(prompt_len), prefix_len + prompt_len
        new = NewRequest(room=Room(1), prompt_len=total_len, owner_base=0, sampling=Sampling(), destination=None)
        scheduled = replace(
            dummy_request(prompt_len, prefix_len),
            room=new.room,
            token_ids=[rng.randrange(self._config.vocab_size) for _ in range(prompt_len)],
            new_pages=[list(range(pages_for(total_len, _PAGE_SIZE)))],
        )
        return StepPlan(step=1, shape=choice.shape, new_requests=[new], scheduled=[scheduled], releases=[new.room])


def _waits_s(groups: RankGroups) -> tuple[float, float]:
    """Return the time that this rank has spent in collectives so far: in all, and on projections of other ranks."""
    return sum(group.waited_s for group in groups.all), groups.model.projections.waited_s


def _received_bytes(groups: RankGroups) -> int:
    return sum(group.received_bytes for group in groups.all)
