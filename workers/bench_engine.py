"""The engine on one device, for `baton bench engine`: steps as on a replica of one rank. No scheduler, no handoff."""

import random
import time
from collections.abc import Sequence
from statistics import median

import torch

from cluster.spec.config import AttentionSetting, Device
from cluster.spec.ids import Room
from cluster.spec.kv import pages_for
from cluster.spec.sampling import Sampling
from cluster.spec.step_messages import Admit, Row, StepPlan
from cluster.spec.strategy import Strategy
from workers.attention.registry import choose_backend
from workers.bench_kernels import KernelBench
from workers.bench_transformers import TransformersPeer
from workers.cache.page_pool import PagePool
from workers.cpu import use_cpu
from workers.device import open_device
from workers.engine.begun_step import BegunStep
from workers.engine.capture import GraphCapture
from workers.engine.random_weights import random_model
from workers.engine.runner import ModelRunner
from workers.engine_result import ENGINE_SHAPES, EngineResult, ModelWork, Timed, num_same
from workers.kernel_result import ChipLimits
from workers.models.decoder import DecoderModel
from workers.models.registry import parse_model_config
from workers.parallel.collectives import Communicator

_PAGE_SIZE = 64
_ROOM = Room(1)
_CPU_MATRIX = 1024
_CPU_COPY_BYTES = 64 << 20
_CPU_REPEATS = 5


class EngineBench:
    """A model of random weights; bf16 on a GPU, and fp32 on a CPU, where both engines then say the same."""

    def __init__(self, name: str, device: Device, most_tokens: int, chunk_tokens: int) -> None:
        """For requests of so many tokens in all; UserError where there is no such device."""
        self._device = open_device(device)
        use_cpu(1)  # a worker's default
        self._name, self._chunk_tokens = name, chunk_tokens
        # Before anything else takes memory.
        self._limits = KernelBench().limits() if device is Device.CUDA else _cpu_limits()
        dtype = torch.bfloat16 if device is Device.CUDA else torch.float32
        config = parse_model_config(ENGINE_SHAPES[name])
        self._model = random_model(config, dtype, self._device)
        self._runner = _make_runner(self._model, most_tokens)
        self._peer: TransformersPeer | None = None
        self._no_peer = ""
        self._host_s: list[float] = []
        """That each step after a prompt took to begin."""
        try:
            self._peer = TransformersPeer(ENGINE_SHAPES[name], self._model)
        except ImportError as error:
            self._no_peer = f"cannot be loaded: {error}"

    def close(self) -> None:
        """Nothing is held that the process's end does not give back."""

    def limits(self) -> ChipLimits:
        """What the device can do, measured first."""
        return self._limits

    def measure(self, prompt_len: int, output_len: int, num_rounds: int) -> EngineResult:
        """Both engines in turns, after a round that does not count."""
        rng = random.Random(prompt_len)
        prompt = [rng.randrange(self._model.config.vocab_size) for _ in range(prompt_len)]
        ours, theirs, problem = [], [], self._no_peer
        for number in range(1 + num_rounds):
            if number == 1:
                self._host_s.clear()
            ours.append(self._generate(prompt, output_len))
            if not problem and self._peer is not None:
                try:
                    theirs.append(self._peer.generate(prompt, output_len))
                except RuntimeError as error:  # of which one without memory is the likeliest
                    problem = str(error).partition("\n")[0]
        work = model_work(self._model)
        own, peer = _medians(ours), None if problem else _medians(theirs)
        ttft_floor_s = work.prefill_flops(prompt_len) / self._limits.flops_per_s
        tpot_floor_s = work.decode_bytes(prompt_len + output_len / 2) / self._limits.bytes_per_s
        return EngineResult(
            model=self._name,
            prompt_len=prompt_len,
            output_len=output_len,
            ttft_s=own.ttft_s,
            tpot_s=own.tpot_s,
            ttft_floor_s=ttft_floor_s,
            tpot_floor_s=tpot_floor_s,
            ttft_ratio=own.ttft_s / ttft_floor_s,
            tpot_ratio=own.tpot_s / tpot_floor_s,
            host_s=median(self._host_s) if self._runner.is_asynchronous else None,
            transformers_ttft_s=None if peer is None else peer.ttft_s,
            transformers_tpot_s=None if peer is None else peer.tpot_s,
            num_same_tokens=None if peer is None else num_same(own.token_ids, peer.token_ids),
            transformers_problem=problem or None,
        )

    def _generate(self, prompt: Sequence[int], num_tokens: int) -> Timed:
        """Chunk after chunk, then token after token, of which a GPU begins the next before one is read."""
        start_s = time.perf_counter()
        admit = Admit(room=_ROOM, prompt_len=len(prompt), owner_base=0, sampling=Sampling(), target=None)
        pages = list(range(pages_for(len(prompt) + num_tokens, _PAGE_SIZE)))
        for first in range(0, len(prompt), self._chunk_tokens):
            chunk = list(prompt[first : first + self._chunk_tokens])
            is_last = first + len(chunk) == len(prompt)
            row = _row(first, chunk, new_pages=[] if first else pages, samples=is_last)
            begun = self._begin(row, admit=None if first else admit)
        tokens = [begun.wait()[_ROOM].token_id]
        times = [time.perf_counter()]
        following: BegunStep | None = None
        for place in range(1, num_tokens):
            begun = following or self._begin(_row(len(prompt) + place - 1, [tokens[-1]], place))
            following = None
            if self._runner.is_asynchronous and place + 1 < num_tokens:
                following = self._begin(_row(len(prompt) + place, [0], place + 1, follows=True))
            tokens.append(begun.wait()[_ROOM].token_id)
            times.append(time.perf_counter())
        return Timed.of(start_s, times, tokens)

    def _begin(self, row: Row, admit: Admit | None = None) -> BegunStep:
        admits, releases = ([], []) if admit is None else ([admit], [_ROOM])
        plan = StepPlan(step=1, strategy=Strategy.NONE, admits=admits, rows=[row], releases=releases)
        start_s = time.perf_counter()
        begun = self._runner.begin(plan)
        if row.output_position:
            self._host_s.append(time.perf_counter() - start_s)
        return begun


def model_work(model: DecoderModel) -> ModelWork:
    """Of a model that is whole on one rank."""
    config, weights = model.config, list(model.parameters())
    return ModelWork(
        num_weights=sum(weight.numel() for weight in weights),
        weight_bytes=sum(weight.nbytes for weight in weights),
        attention_width=config.num_layers * config.num_heads * config.head_dim,
        token_bytes=2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize,
    )


def _make_runner(model: DecoderModel, most_tokens: int) -> ModelRunner:
    """Ready for one request."""
    config = model.config
    num_pages = pages_for(most_tokens, _PAGE_SIZE)
    shape = (config.num_kv_heads, config.num_layers, _PAGE_SIZE, config.head_dim, model.dtype)
    pool = PagePool(num_pages, *shape, device=model.device)
    attention = choose_backend(AttentionSetting.AUTO, model.device, model.dtype)
    runner = ModelRunner(model, pool, attention.backend, Communicator("cp"))
    runner.warm_up()
    if model.device.type == "cuda":
        runner.capture_decode(1, GraphCapture(torch.cuda.Stream(model.device)))  # type: ignore[no-untyped-call]
    return runner


def _row(
    first_position: int,
    token_ids: list[int],
    output_position: int = 0,
    *,
    new_pages: Sequence[int] = (),
    samples: bool = True,
    follows: bool = False,
) -> Row:
    return Row(
        room=_ROOM,
        first_position=first_position,
        token_ids=token_ids,
        new_pages=list(new_pages),
        samples=samples,
        output_position=output_position,
        follows=follows,
    )


def _medians(rounds: Sequence[Timed]) -> Timed:
    """Of all rounds but the first."""
    counted = rounds[1:]
    times = (median(timed.ttft_s for timed in counted), median(timed.tpot_s for timed in counted))
    return Timed(*times, counted[-1].token_ids)


def _cpu_limits() -> ChipLimits:
    """Of one thread, in fp32."""
    a, b = torch.randn(2, _CPU_MATRIX, _CPU_MATRIX)
    source = torch.ones(_CPU_COPY_BYTES, dtype=torch.uint8)
    target = source.clone()
    matmul_s, copy_s = [], []
    for _ in range(_CPU_REPEATS):
        start_s = time.perf_counter()
        a @ b
        middle_s = time.perf_counter()
        target.copy_(source)
        matmul_s.append(middle_s - start_s)
        copy_s.append(time.perf_counter() - middle_s)
    return ChipLimits(
        device="one CPU thread",
        flops_per_s=2 * _CPU_MATRIX**3 / min(matmul_s),
        bytes_per_s=2 * _CPU_COPY_BYTES / min(copy_s),
    )
