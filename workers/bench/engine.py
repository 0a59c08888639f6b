"""`baton bench engine`: the engine on one device, without scheduler or handoff, compared with transformers."""

import random
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from cluster.spec.config import AttentionSetting, Device
from cluster.spec.errors import UserError
from cluster.spec.ids import Room
from cluster.spec.kv import pages_for
from cluster.spec.sampling import Sampling
from cluster.spec.step_messages import NewRequest, ScheduledRequest, StepPlan
from workers.bench.device_limits import GpuTimer, cpu_limits, gpu_limits
from workers.bench.results import DeviceLimits, EngineResult
from workers.bench.shapes import SHAPES
from workers.context_parallel.shard_plan import make_step_shape
from workers.device import missing_gpu, open_device, use_cpu
from workers.engine.begun_step import BegunStep
from workers.engine.captures import capture_maker
from workers.engine.native_kernels import choose_kernels
from workers.engine.rank_groups import RankGroups
from workers.engine.runner import ModelRunner
from workers.engine.warm_up import warm_up
from workers.engine.weights import random_model, torch_dtype
from workers.memory.huge_pages import use_huge_pages
from workers.memory.page_pool import PagePool
from workers.models.decoder import DecoderModel
from workers.models.registry import parse_model_config

_PAGE_SIZE = 64
_CHUNK_TOKENS = 8192

Tokens = Sequence[Sequence[int]]
"""Token ids of each request of a batch, of equal length."""


class Timed(NamedTuple):
    """Answers of at least two tokens, with their timing."""

    ttft_s: float
    """Time until every request of the batch has its first token."""
    tpot_s: float
    answers: Tokens


class TransformersPeer:
    """Transformers model with the engine's weights, which must not be packed yet."""

    def __init__(self, raw: Mapping[str, Any], model: DecoderModel) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**raw)
        with torch.device("meta"):
            make: Any = AutoModelForCausalLM.from_config
            self._model = make(config, dtype=model.dtype, attn_implementation="sdpa")
        weights = {name: part.plain for name, part in model.weights().items()}
        self._model.load_state_dict(weights, assign=True, strict=False)
        self._model.tie_weights()
        # Rotary frequencies come from the configuration, not from the weights.
        with model.device.torch_device:
            self._model.model.rotary_emb = type(self._model.model.rotary_emb)(config)
        missing = [name for name, parameter in self._model.named_parameters() if parameter.is_meta]
        assert not missing, f"not in our model: {missing}"
        self._model.eval()
        self._device = model.device.torch_device

    def generate(self, prompts: Tokens, num_tokens: int) -> Timed:
        """Generate greedy answers. Raises RuntimeError if memory runs out."""
        from transformers import DynamicCache

        start_s = time.perf_counter()
        tokens, times_s, cache = torch.tensor(prompts, device=self._device), list[float](), DynamicCache()
        answers = list[list[int]]()
        with torch.inference_mode():
            for _ in range(num_tokens):
                out = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                tokens = out.logits[:, -1:].argmax(dim=-1)
                answers.append(tokens.flatten().tolist())
                times_s.append(time.perf_counter())
        return timed(start_s, times_s, [*zip(*answers, strict=True)])


class EngineBench:
    """Model with random weights. In fp32, both engines produce the same tokens."""

    def __init__(
        self, name: str, device: Device, most_tokens: int, dtype_name: str = "auto", batch_size: int = 1
    ) -> None:
        """Load the model for requests of up to ``most_tokens`` tokens. Raises UserError if the device is missing.

        The format ``auto`` is bf16 on a GPU and fp32 on a CPU.
        """
        if device is Device.CUDA and (missing := missing_gpu()) is not None:
            raise UserError(f"--device: got cuda, but {missing}; allowed here: cpu")
        opened = open_device(device)
        use_cpu(1)  # same as a worker's default
        self._name = name
        # Measured first, while memory is free.
        if device is Device.CUDA:
            dtype = torch_dtype("bfloat16" if dtype_name == "auto" else dtype_name)
            self._limits = gpu_limits(opened.torch_device, GpuTimer(opened.torch_device))
        else:
            dtype = torch_dtype("float32" if dtype_name == "auto" else dtype_name)
            self._limits = cpu_limits(dtype)
        raw = SHAPES[name].config_json()
        self._model = random_model(parse_model_config(raw), dtype, opened)
        self._peer = TransformersPeer(raw, self._model)
        self._batch_size = batch_size
        self._runner = _make_runner(self._model, most_tokens, batch_size)

    def close(self) -> None:
        """Do nothing. Everything is released when the process exits."""

    def limits(self) -> DeviceLimits:
        return self._limits

    def measure(self, prompt_len: int, output_len: int, num_rounds: int) -> EngineResult:
        """Measure both engines alternately, after a warm-up round."""
        rng = random.Random(prompt_len)
        vocab = range(self._model.config.vocab_size)
        prompts = [rng.choices(vocab, k=prompt_len) for _ in range(self._batch_size)]
        ours, theirs, problem = list[Timed](), list[Timed](), ""
        for _ in range(1 + num_rounds):
            ours.append(self._generate(prompts, output_len))
            if not problem:
                try:
                    theirs.append(self._peer.generate(prompts, output_len))
                except RuntimeError as error:  # most likely out of memory
                    problem = str(error).partition("\n")[0]
        own, peer, shape = _medians(ours), None if problem else _medians(theirs), SHAPES[self._name]
        num_keys, itemsize = self._batch_size * (prompt_len + output_len / 2), self._model.dtype.itemsize
        ttft_floor_s = self._batch_size * shape.prefill_flops(prompt_len) / self._limits.flops_per_s
        tpot_floor_s = shape.decode_bytes(num_keys, itemsize) / self._limits.bytes_per_s
        return EngineResult(
            model=self._name,
            batch_size=self._batch_size,
            prompt_len=prompt_len,
            output_len=output_len,
            ttft_ms=own.ttft_s * 1e3,
            ttft_ratio=own.ttft_s / ttft_floor_s,
            tpot_ms=own.tpot_s * 1e3,
            tpot_ratio=own.tpot_s / tpot_floor_s,
            transformers_ttft_ms=peer and peer.ttft_s * 1e3,
            transformers_tpot_ms=peer and peer.tpot_s * 1e3,
            num_same_tokens=peer and min(map(num_same, own.answers, peer.answers)),
            transformers_problem=problem or None,
        )

    def _generate(self, prompts: Tokens, num_tokens: int) -> Timed:
        """Compute one prompt after another, then a token of each request per step. A GPU gets each step before the
        previous one ends.
        """
        start_s = time.perf_counter()
        answers = [[self._first_token(Room(number), prompt, num_tokens)] for number, prompt in enumerate(prompts)]
        times_s = [time.perf_counter()]
        following: BegunStep | None = None
        prompt_len = len(prompts[0])
        for index in range(1, num_tokens):
            tokens = [answer[-1] for answer in answers]
            begun = following or self._begin(_decode_step(prompt_len + index - 1, tokens, index))
            following = None
            if self._runner.is_asynchronous and index + 1 < num_tokens:
                unknown = [0] * len(prompts)
                step = _decode_step(prompt_len + index, unknown, index + 1, input_from_previous_step=True)
                following = self._begin(step)
            sampled = begun.wait()
            for number, answer in enumerate(answers):
                answer.append(sampled[Room(number)].token_id)
            times_s.append(time.perf_counter())
        return timed(start_s, times_s, answers)

    def _first_token(self, room: Room, prompt: Sequence[int], num_tokens: int) -> int:
        """Compute a prompt in chunks."""
        new = NewRequest(room=room, prompt_len=len(prompt), owner_base=0, sampling=Sampling(), destination=None)
        num_pages = pages_for(len(prompt) + num_tokens, _PAGE_SIZE)
        pages = list(range(room * num_pages, (room + 1) * num_pages))
        for first in range(0, len(prompt), _CHUNK_TOKENS):
            chunk = [*prompt[first : first + _CHUNK_TOKENS]]
            scheduled = ScheduledRequest(
                room=room,
                first_position=first,
                token_ids=chunk,
                new_pages=[] if first else [pages],
                samples=first + len(chunk) == len(prompt),
                output_position=0,
            )
            begun = self._begin([scheduled], new=None if first else new)
        return begun.wait()[room].token_id

    def _begin(self, scheduled: Sequence[ScheduledRequest], new: NewRequest | None = None) -> BegunStep:
        new_requests, releases = ([], []) if new is None else ([new], [new.room])
        shape = make_step_shape(scheduled)
        plan = StepPlan(step=1, shape=shape, new_requests=new_requests, scheduled=[*scheduled], releases=releases)
        return self._runner.begin(plan)


def timed(start_s: float, times_s: Sequence[float], answers: Tokens) -> Timed:
    """Return the answers with their timing. ``times_s`` holds the times when their tokens reached the host."""
    return Timed(times_s[0] - start_s, (times_s[-1] - times_s[0]) / (len(times_s) - 1), answers)


def num_same(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((index for index, (own, other) in pairs if own != other), len(ours))


def _make_runner(model: DecoderModel, most_tokens: int, batch_size: int) -> ModelRunner:
    geometry = model.config.kv_geometry("bench", str(model.dtype).removeprefix("torch."), _PAGE_SIZE)
    num_pages = batch_size * pages_for(most_tokens, _PAGE_SIZE)
    pool = PagePool.of_one_rank(geometry, num_pages, model.device.torch_device)
    if not model.device.has_own_memory:
        use_huge_pages(pool.bytes.data_ptr(), pool.bytes.nbytes)
    attention = choose_kernels(AttentionSetting.AUTO, model, geometry).backend
    runner = ModelRunner(model, pool, attention, RankGroups())
    warm_up(runner)
    runner.capture_decode(batch_size, capture_maker(model.device)())
    return runner


def _decode_step(
    position: int, token_ids: Sequence[int], output_position: int, *, input_from_previous_step: bool = False
) -> list[ScheduledRequest]:
    """Schedule a token of each request, all at one position."""
    return [
        ScheduledRequest(
            room=Room(number),
            first_position=position,
            token_ids=[token_id],
            new_pages=[],
            samples=True,
            output_position=output_position,
            input_from_previous_step=input_from_previous_step,
        )
        for number, token_id in enumerate(token_ids)
    ]


def _medians(rounds: Sequence[Timed]) -> Timed:
    counted = rounds[1:]
    return Timed(median(each.ttft_s for each in counted), median(each.tpot_s for each in counted), counted[-1].answers)
