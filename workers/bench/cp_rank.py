"""Rank process of `baton bench cp`, which runs single prefill steps of a model with random weights."""

import random
import time

from msgspec.structs import replace

from cluster.spec.config import AttentionSetting
from cluster.spec.ids import Room
from cluster.spec.kv import pages_for
from cluster.spec.registry import KvOwnership
from cluster.spec.sampling import Sampling
from cluster.spec.step_messages import NewRequest, StepPlan
from cluster.spec.strategy import CpMode
from workers.attention.registry import choose_backend, needs_of
from workers.bench.results import StepTime, Way
from workers.context_parallel.cost_model import Rates, StrategyChoice, StrategyChooser
from workers.context_parallel.shard_plan import dummy_request
from workers.device import CPU, use_cpu
from workers.engine.calibration import calibrate
from workers.engine.rank_groups import RankGroups
from workers.engine.runner import ModelRunner
from workers.engine.weights import random_model, torch_dtype
from workers.kernels import elementwise
from workers.memory.page_pool import PagePool
from workers.models.interface import DecoderConfig
from workers.native.library import Library
from workers.parallel.collectives import Communicator
from workers.parallel.groups import ReplicaStore, join_group, join_store, open_store

_HOST = "127.0.0.1"
_TIMEOUT_S = 600.0
_PAGE_SIZE = 64


class CpBenchRank:
    """Model on one rank, which joins one group for each CP size to measure."""

    def __init__(self, config: DecoderConfig, max_len: int, mode: CpMode) -> None:
        use_cpu(1)
        self._config, self._mode = config, mode
        dtype = torch_dtype(config.dtype)
        self._shape = config.cost(config.dtype)
        self._model = random_model(config, dtype, CPU)
        self._model.pack()
        geometry = config.kv_geometry("bench", config.dtype, _PAGE_SIZE)
        self._pool = PagePool.of_one_rank(geometry, pages_for(max_len, _PAGE_SIZE))
        needs, shape = needs_of(geometry.groups), self._model.attention
        attention = choose_backend(AttentionSetting.AUTO, self._model.device, dtype, needs, shape)
        if "native" in attention.name:
            elementwise.register(CPU, dtype, Library.load())
        self._backend = attention.backend
        self._store: ReplicaStore | None = None
        self._groups: dict[int, tuple[Communicator, ModelRunner, Rates]] = {}

    def open_store(self) -> str:
        """Open the store through which the ranks form groups. Return its ``host:port``."""
        self._store, port = open_store(_HOST, _TIMEOUT_S)
        return f"{_HOST}:{port}"

    def join(self, store: str, rank: int, cp: int) -> None:
        """Form a group of the first ``cp`` ranks, warm up and measure rates."""
        if self._store is None:
            self._store = join_store(store, _TIMEOUT_S)
        group = join_group(self._store, f"cp{cp}", range(cp), rank, host=_HOST, timeout_s=_TIMEOUT_S)
        is_sharded = self._mode is CpMode.RING and cp > 1
        ownership = KvOwnership.SHARDED if is_sharded else KvOwnership.REPLICATED
        runner = ModelRunner(self._model, self._pool, self._backend, RankGroups(cp=group), ownership)
        runner.warm_up()
        self._groups[cp] = group, runner, calibrate(self._model, self._pool, self._backend, group, self._shape)

    def choose(self, way: Way, prompt_len: int, prefix_len: int) -> StrategyChoice:
        """Return how to run a step, based on this rank's measured rates. Rank 0 decides for all ranks."""
        _, _, rates = self._groups[way.cp]
        chooser = StrategyChooser(setting=way.strategy, cp=way.cp, shape=self._shape, rates=rates, mode=self._mode)
        return chooser([dummy_request(prompt_len, prefix_len)])

    def step(self, way: Way, choice: StrategyChoice, prompt_len: int, prefix_len: int) -> StepTime:
        """Compute a prompt up to its first token in one step of the first ``way.cp`` ranks."""
        plan = self._plan(choice, prompt_len, prefix_len)
        group, runner, _ = self._groups[way.cp]
        group.barrier()
        waited_before_s, start_s = group.waited_s, time.perf_counter()
        runner.execute(plan)
        return StepTime(time.perf_counter() - start_s, group.waited_s - waited_before_s)

    def close(self) -> None:
        for group, _, _ in self._groups.values():
            group.destroy()

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
