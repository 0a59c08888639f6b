"""Construction of a rank and of a worker's parts."""

import logging
import re
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from cluster.spec.config import DeployConfig
from cluster.spec.errors import UserError
from cluster.spec.ids import ROUTER, Incarnation, Peer, Role, Room
from cluster.spec.kv import PoolLayout
from cluster.spec.messages import Submit, TableUpdate
from cluster.spec.registry import RankRecord, ReplicaEntry, ReplicaLoad, TableSnapshot
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.step_messages import StepPlan
from cluster.spec.strategy import CpMode, Passing, PassingSetting, Strategy, StrategySetting
from cluster.spec.transfer_messages import Ticket
from cluster.spec.wire import TokenIds
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.rank_records import GEOMETRY, LAYOUT, make_record, sizes
from tests.fakes.worker_specs import lone_worker
from workers import rank
from workers.attention.registry import BackendChoice
from workers.build import make_leader
from workers.context_parallel.cost_model import ModelShape, Rates
from workers.engine.native_kernels import choose_kernels
from workers.parallel.store import exchange

CP = 2
SHAPE = ModelShape(
    num_layers=2,
    linear_flops=10**9,
    kv_flops=0,
    attention_flops=0,
    kv_row_bytes=16,
    q_row_bytes=16,
    partial_row_bytes=0,
)
"""Shape with ten milliseconds per token in the first layer, compared with which no communication counts."""
LONGEST = 100
DECODE = make_record("decode-0", 0, sizes())


def plan_of(*prompt_lens: int, **prefill: Any) -> StepPlan:
    """Return the first step of a replica with two CP ranks for some prompts. No step here is long enough to be cut."""
    config = DeployConfig.model_validate({"prefill": {"parallel": {"cp": CP}, **prefill}})
    spec = lone_worker(config, Role.PREFILL)
    layout = msgspec.structs.replace(LAYOUT, num_pages=64)
    records = [
        make_record(spec.replica, rank, spec.sizes, layout=layout, ownership=spec.ownership) for rank in range(CP)
    ]
    leader = make_leader(spec, loaded_rank(layout, Rates(step_s=0.1)), records)
    leader.on_message(table(records), 0.0)
    for room, prompt_len in enumerate(prompt_lens, 1):
        leader.on_message(submit(Room(room), records, prompt_len), 0.0)
        leader.on_message(ticket(Room(room), prompt_len), 0.0)
    (plan,) = leader.next_plans()
    return plan


def loaded_rank(layout: PoolLayout, rates: Rates) -> Any:
    return SimpleNamespace(
        layout=layout,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=LONGEST)),
        runner=SimpleNamespace(is_asynchronous=False),
        model_shape=SHAPE,
        rates=rates,
        backend=SimpleNamespace(settle_s=1.0),
        step_recorder=SimpleNamespace(recorder=None),
    )


def table(prefill: list[RankRecord]) -> TableUpdate:
    entries = [
        ReplicaEntry(
            replica=records[0].replica,
            incarnation=records[0].incarnation,
            ready=True,
            ranks=tuple(records),
            load=ReplicaLoad(),
        )
        for records in (prefill, [DECODE])
    ]
    return TableUpdate(snapshot=TableSnapshot(version=1, replicas=tuple(entries), reaped={}))


def submit(room: Room, records: list[RankRecord], prompt_len: int) -> Submit:
    return Submit(
        room=room,
        prompt_ids=TokenIds.of(range(room, room + prompt_len)),
        sampling=Sampling(),
        stopping=Stopping(max_tokens=1),
        prefill=records[0].peer,
        decode=DECODE.peer,
        router=Peer(replica=ROUTER, incarnation=Incarnation(1), address="router"),
    )


def ticket(room: Room, prompt_len: int) -> Ticket:
    return Ticket(
        room=room,
        decode=DECODE.peer,
        prefill_incarnation=Incarnation(1),
        pages=[list(range(-(-prompt_len // GEOMETRY.page_size)))],
        num_held_pages=0,
        geometry=GEOMETRY,
    )


@pytest.mark.parametrize("setting", [setting for setting in StrategySetting if setting is not StrategySetting.AUTO])
def test_a_forced_strategy_is_that_of_every_step(setting: StrategySetting) -> None:
    assert [plan_of(prompt_len, strategy=setting).shape.strategy for prompt_len in (1, 64)] == [setting.value] * 2


@pytest.mark.parametrize("prefill", [{}, {"strategy": "auto"}])
def test_auto_shards_only_steps_that_benefit(prefill: dict[str, str]) -> None:
    short, long = (plan_of(prompt_len, **prefill).shape.strategy for prompt_len in (1, 64))
    assert short is Strategy.NONE
    assert long in (Strategy.CONTIGUOUS, Strategy.ZIGZAG, Strategy.INTERLEAVE)


@pytest.mark.parametrize(
    ("mode", "passing", "planned"),
    [
        (CpMode.GATHER, PassingSetting.AUTO, None),
        (CpMode.RING, PassingSetting.PASS_KV, Passing.PASS_KV),
        (CpMode.RING, PassingSetting.PASS_Q, Passing.PASS_Q),
    ],
)
def test_mode_and_passing_follow_the_file(mode: CpMode, passing: PassingSetting, planned: Passing | None) -> None:
    assert plan_of(64, strategy=StrategySetting.ZIGZAG, mode=mode, passing=passing).shape.passing is planned


@pytest.mark.parametrize(("fixed_s", "least", "most"), [(0.03, 20, 39), (1.0, 80, 80)])
def test_decode_computes_as_many_prompts_in_a_step_as_make_it_efficient(fixed_s: float, least: int, most: int) -> None:
    spec = lone_worker(DeployConfig(), Role.DECODE)
    layout = msgspec.structs.replace(LAYOUT, num_pages=64)
    records = [make_record(spec.replica, 0, spec.sizes, layout=layout)]
    rates = Rates(step_s=fixed_s, linear_flops_per_s=2e10, exchange_s=0.0)
    leader = make_leader(spec, loaded_rank(layout, rates), records)
    for room in range(1, 5):
        alone = msgspec.structs.replace(submit(Room(room), records, 20), prefill=None, decode=records[0].peer)
        leader.on_message(alone, 0.0)
    leader.tick(0.0)
    (plan,) = leader.next_plans()
    assert least <= sum(len(request.token_ids) for request in plan.scheduled) <= most


@pytest.mark.parametrize(("mode", "num_tokens"), [(CpMode.GATHER, 120), (CpMode.RING, LONGEST)])
def test_the_ring_transfers_of_a_step_are_bounded_by_one_prompt(mode: CpMode, num_tokens: int) -> None:
    """The longest prompt determines the measured memory."""
    plan = plan_of(60, 60, strategy=StrategySetting.ZIGZAG, mode=mode)
    assert sum(len(request.token_ids) for request in plan.scheduled) == num_tokens


def test_a_rank_logs_its_weights_and_its_pool(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = DeployConfig.model_validate({"kv": {"memory_gib": 0.01}})
    spec = lone_worker(config, Role.DECODE)
    store: Any = HashStore()
    with closing(rank.load_rank(spec, make_checkpoint(tmp_path, "qwen3"), store)) as loaded:
        pages = loaded.layout.num_pages
    assert re.search(r"loaded \S+ GiB of weights in \S+ s\n", caplog.text)
    assert f"KV pool: {pages} pages, {pages * config.kv.page_size} tokens" in caplog.text


def test_a_rank_measures_once_its_tokenizer_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a large vocabulary holds up all threads."""
    order: list[str] = []

    def read_tokens(*_: object) -> None:
        time.sleep(0.2)
        order.append("read")

    def choose(*given: Any) -> BackendChoice:
        order.append("measured")
        return choose_kernels(*given)

    monkeypatch.setattr("cluster.grammar._read_tokens", read_tokens)
    monkeypatch.setattr("workers.rank.choose_kernels", choose)
    config = DeployConfig.model_validate({"kv": {"memory_gib": 0.01}})
    store: Any = HashStore()
    rank.load_rank(lone_worker(config, Role.DECODE), make_checkpoint(tmp_path, "qwen3"), store).close()
    assert order == ["read", "measured"]


def test_a_missing_gpu_is_reported_before_the_groups_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def join_groups(*_: object) -> None:
        raise AssertionError("NCCL needs the GPU")

    monkeypatch.setattr(rank, "join_groups", join_groups)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = DeployConfig.model_validate({"resources": {"device": "cuda"}})
    store: Any = HashStore()
    with pytest.raises(UserError, match=r"^resources\.device: got cuda, but torch "):
        rank.load_rank(lone_worker(config, Role.DECODE), make_checkpoint(tmp_path, "qwen3"), store)
    with pytest.raises(RuntimeError, match="rank 0 has left"):
        exchange(store, "here", 1, 2, "here")
