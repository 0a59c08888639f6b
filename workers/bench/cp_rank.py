"""One rank of `baton bench cp`: a model with random weights that computes single prefill steps."""

import random
import time

import torch
from msgspec.structs import replace

from cluster.spec.config import AttentionSetting
from cluster.spec.ids import Room
from cluster.spec.kv import pages_for
from cluster.spec.registry import KvOwnership
from cluster.spec.sampling import Sampling
from cluster.spec.step_messages import Admit, StepPlan
from cluster.spec.strategy import CpMode, PassingSetting
from workers.attention.registry import choose_backend, needs_of
from workers.bench.results import StepLens, StepTime, Way
from workers.context_parallel.cost_model import Rates, StrategyChoice, StrategyChooser
from workers.context_parallel.shard_plan import dummy_request
from workers.device import use_cpu
from workers.engine.calibration import calibrate
from workers.engine.runner import ModelRunner
from workers.engine.weights import random_model, torch_dtype
from workers.kernels import elementwise
from workers.memory.page_pool import PagePool
from workers.models.interface import DecoderConfig
from workers.native.library import NativeElementwise
from workers.parallel.collectives import Communicator
from workers.parallel.groups import ReplicaStore, join_group, join_store, open_store

_HOST = "127.0.0.1"
_TIMEOUT_S = 600.0
_PAGE_SIZE = 64
_OWNERSHIP = {CpMode.GATHER: KvOwnership.REPLICATED, CpMode.RING: KvOwnership.SHARDED}


class CpBenchRank:
    """Process that forms a group of every requested size with the ranks before it."""

    def __init__(self, global_rank: int, config: DecoderConfig, max_len: int) -> None:
        use_cpu(1)
        self._global_rank = global_rank
        self._config = config
        dtype = torch_dtype(config.dtype)
        self._shape = config.cost(config.dtype)
        self._model = random_model(config, dtype, torch.device("cpu"))
        self._model.pack()
        num_pages = pages_for(max_len, _PAGE_SIZE)
        geometry = config.kv_geometry("bench", config.dtype, _PAGE_SIZE)
        self._pool = PagePool.of_one_rank(geometry, num_pages)
        attention = choose_backend(AttentionSetting.AUTO, self._model.device, dtype, needs_of(geometry.groups))
        if attention.name == "native":
            elementwise.register("cpu", torch.bfloat16, NativeElementwise.load())
        self._backend = attention.backend
        self._store: ReplicaStore | None = None
        self._groups: dict[int, Communicator] = {}
        self._rates: dict[int, Rates] = {}
        self._runners: dict[tuple[int, CpMode], ModelRunner] = {}

    def open_store(self) -> str:
        """Open the store at which the ranks meet, on rank 0; return its ``host:port``."""
        self._store, port = open_store(_HOST, _TIMEOUT_S)
        return f"{_HOST}:{port}"

    def join(self, store: str, cp: int) -> None:
        """Form the group of ranks 0..cp-1, warm up and measure rates; each of these ranks calls this."""
        if self._store is None:
            self._store = join_store(store, _TIMEOUT_S)
        ranks, rank = range(cp), self._global_rank
        self._groups[cp] = group = join_group(self._store, f"cp{cp}", ranks, rank, host=_HOST, timeout_s=_TIMEOUT_S)
        for mode, ownership in _OWNERSHIP.items():
            runner = ModelRunner(self._model, self._pool, self._backend, group, ownership)
            runner.warm_up()
            self._runners[cp, mode] = runner
        self._rates[cp] = calibrate(self._model, self._pool, self._backend, group, self._shape)

    def choose(self, way: Way, lens: StepLens) -> StrategyChoice:
        """Return how to run a step by this rank's measured rates; rank 0 decides for all."""
        chooser = StrategyChooser(
            setting=way.strategy,
            cp=way.cp,
            shape=self._shape,
            rates=self._rates[way.cp],
            mode=way.mode,
            passing=way.passing or PassingSetting.AUTO,
        )
        return chooser([dummy_request(lens.prompt_len, lens.prefix_len)])

    def kv_bytes(self, way: Way, num_tokens: int) -> int:
        """Return the bytes of a request's pages on the rank that owns most of them."""
        num_owners = way.cp if way.mode is CpMode.RING else 1
        return -(-pages_for(num_tokens, _PAGE_SIZE) // num_owners) * self._pool.page_bytes

    def step(self, way: Way, choice: StrategyChoice, lens: StepLens) -> StepTime:
        """Compute one prompt in one step with the first ``cp`` ranks, up to its first token."""
        plan = self._plan(choice, lens)
        group, runner = self._groups[way.cp], self._runners[way.cp, way.mode]
        group.barrier()
        waited_before_s, start_s = group.waited_s, time.perf_counter()
        runner.execute(plan)
        return StepTime(time.perf_counter() - start_s, group.waited_s - waited_before_s)

    def close(self) -> None:
        for group in self._groups.values():
            group.destroy()

    def _plan(self, choice: StrategyChoice, lens: StepLens) -> StepPlan:
        rng = random.Random(lens.prompt_len)
        admit = Admit(room=Room(1), prompt_len=lens.total, owner_base=0, sampling=Sampling(), destination=None)
        scheduled = replace(
            dummy_request(lens.prompt_len, lens.prefix_len),
            room=admit.room,
            token_ids=[rng.randrange(self._config.vocab_size) for _ in range(lens.prompt_len)],
            new_pages=[list(range(pages_for(lens.total, _PAGE_SIZE)))],
        )
        return StepPlan(step=1, shape=choice.shape, admits=[admit], scheduled=[scheduled], releases=[admit.room])
