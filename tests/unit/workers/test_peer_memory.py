"""Peers' access to pages in GPU memory, direct or through the host."""

import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from cluster.spec.checks import config_problems
from cluster.spec.config import DeployConfig, TransferBackendName, TransferProtocol
from cluster.spec.errors import TransferError, UserError
from cluster.spec.ids import Role
from cluster.spec.registry import KvOwnership, Verify
from cluster.spec.tiers import TierPage
from tests.fakes.loopback import Loopback
from tests.fakes.mooncake_engine import FakeFabric
from tests.fakes.paged_ranks import record
from transfer.backends.interface import TransferBackend
from transfer.backends.registry import make_backend
from transfer.page_range import PageRange, Span
from workers.device import CPU, GPU
from workers.hicache.copier import Copier
from workers.memory.peer_memory import PeerMemory, TierMemory, _check_reachable, open_apart

LAYOUT = record(Role.PREFILL, 0, 1, num_pages=5).layout
PAGE = LAYOUT.page_bytes
HERE = CPU
"""Stand-in for a GPU: the pool has separate memory."""


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> FakeFabric:
    return FakeFabric.installed(monkeypatch)


def backend_of(protocol: TransferProtocol = TransferProtocol.RDMA) -> TransferBackend:
    return make_backend(TransferBackendName.MOONCAKE, "127.0.0.1", protocol)


def opened(backend: TransferBackend, verify: Verify = Verify.COUNTS) -> PeerMemory:
    made = open_apart(LAYOUT, HERE, backend, verify)
    made.pool.group("full_attention").copy_(torch.randn(made.pool.group("full_attention").shape))
    return made


def test_pages_are_copied_from_pool_to_pool(fabric: FakeFabric, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backends = [backend_of(), backend_of()]
    ours, theirs = map(opened, backends)
    for made in (ours, theirs):
        assert made.host is None
        assert made.region.endpoint.base_address == made.pool.group("full_attention").data_ptr()
        assert made.region.endpoint.num_bytes == LAYOUT.pool_bytes
        assert not made.region.buffer
    assert [record.message for record in caplog.records] == ["KV transfer runs directly between GPUs"] * 2
    assert [list(engine.registered) for engine in fabric.engines.values()] == [
        [made.pool.group("full_attention").data_ptr()] for made in (ours, theirs)
    ], "host memory in between"
    before = theirs.pool.group("full_attention").clone()
    ours.publish(PageRange(LAYOUT, [1, 2]), ours.event())
    backends[0].write(ours.region, theirs.region.endpoint, [Span(PAGE, 3 * PAGE, 2 * PAGE)])
    assert fabric.moved == [
        (ours.pool.group("full_attention")[1].data_ptr(), theirs.pool.group("full_attention")[3].data_ptr(), 2 * PAGE)
    ]
    assert torch.equal(theirs.pool.group("full_attention")[3:5], ours.pool.group("full_attention")[1:3])
    assert torch.equal(theirs.pool.group("full_attention")[:3], before[:3])
    theirs.receive([3, 4])
    assert torch.equal(theirs.pool.group("full_attention")[3:5], ours.pool.group("full_attention")[1:3])


@pytest.mark.usefixtures("fabric")
def test_nothing_is_sent_before_it_is_written() -> None:
    events = []
    written: Any = SimpleNamespace(synchronize=lambda: events.append("written"))
    backend = backend_of()
    opened(backend).publish(PageRange(LAYOUT, [0]), written)
    assert events == ["written"]


@pytest.mark.parametrize(
    ("protocol", "verify", "refused", "why"),
    [
        (
            TransferProtocol.RDMA,
            Verify.COUNTS,
            True,
            "mooncake cannot register 192 bytes of GPU memory (status -202); ",
        ),
        (TransferProtocol.TCP, Verify.COUNTS, False, "transfer.protocol: tcp supports only host memory"),
        (TransferProtocol.RDMA, Verify.DIGEST, False, "transfer.verify: digest needs pages in host memory"),
    ],
)
def test_pages_are_staged_through_the_host_with_a_reason(
    fabric: FakeFabric,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    protocol: TransferProtocol,
    verify: Verify,
    *,
    refused: bool,
    why: str,
) -> None:
    caplog.set_level(logging.INFO)
    pools: list[int] = []
    zeros = torch.zeros

    def noted_zeros(*sizes: Any, **options: Any) -> Tensor:
        made = zeros(*sizes, **options)
        pools.append(made.data_ptr())
        return made

    monkeypatch.setattr(torch, "zeros", noted_zeros)
    fabric.refuses = lambda address: refused and address in pools
    made = opened(backend_of(protocol), verify)
    assert made.host is not None
    (record,) = caplog.records
    assert record.message.startswith(f"KV transfer uses a host buffer of the pool's size: {why}")
    (engine,) = fabric.engines.values()
    assert engine.registered == {made.region.endpoint.base_address: LAYOUT.pool_bytes}
    assert made.region.endpoint.base_address != made.pool.group("full_attention").data_ptr()
    made.publish(PageRange(LAYOUT, [2]), made.event())
    assert bytes(made.region.buffer[2 * PAGE : 3 * PAGE]) == made.pool.group("full_attention")[2].numpy().tobytes()


def test_a_gpu_that_may_see_writes_late_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(TransferError, match=r"a GPU with compute capability 8\.0 may see .* required: 9\.0"):
        _check_reachable(GPU, Verify.COUNTS)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    _check_reachable(GPU, Verify.COUNTS)


def test_other_backends_reach_the_host_only() -> None:
    for backend in (make_backend(TransferBackendName.SHARED_MEMORY, ""), Loopback()):
        assert opened(backend).host is not None
        backend.close()


def test_closed_regions_are_unreachable(fabric: FakeFabric) -> None:
    backends = [backend_of(), backend_of()]
    ours, theirs = map(opened, backends)
    with pytest.raises(TransferError, match="exceeds the"):
        backends[0].write(ours.region, theirs.region.endpoint, [Span(LAYOUT.pool_bytes - 1, 0, 2)])
    backends[1].close()
    with pytest.raises(TransferError, match="could not write"):
        backends[0].write(ours.region, theirs.region.endpoint, [Span(0, 0, PAGE)])
    assert fabric.moved == []


def test_pages_of_peers_are_read_right_into_the_pool(fabric: FakeFabric) -> None:
    """The tiers' host pages are divided over the CP ranks."""
    backends = [backend_of(), backend_of()]
    made = [opened(backend) for backend in backends]
    hosts = [backend.allocate(4 * PAGE) for backend in backends]
    records = [
        msgspec.structs.replace(
            record(Role.PREFILL, rank, 2, 5, ownership=KvOwnership.REPLICATED), host_endpoint=host.endpoint
        )
        for rank, host in enumerate(hosts)
    ]
    copiers = [
        Copier(records, rank, TierMemory(one, host), backend)
        for rank, (one, host, backend) in enumerate(zip(made, hosts, backends, strict=True))
    ]
    made[1].pool.group("full_attention").copy_(made[0].pool.group("full_attention"))
    before = made[0].pool.group("full_attention").clone()
    pages = [TierPage(key=bytes([index]), index=index, device=index, host=index) for index in range(4)]
    for copier in copiers:
        copier.save(pages, copier.memory.record_event())
    for one in made:
        one.pool.group("full_attention").zero_()
    fabric.moved.clear()
    for copier in copiers:
        copier.load(pages, copier.memory.record_event())
    assert len(fabric.moved) == 4
    for one in made:
        assert torch.equal(one.pool.group("full_attention")[:4], before[:4])
        assert not one.pool.group("full_attention")[4:].any()


def test_rdma_without_a_card_is_refused(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine would fall back to TCP and treat GPU memory as host memory."""
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    with pytest.raises(UserError, match="MC_FORCE_TCP is set"):
        backend_of()
    monkeypatch.delenv("MC_FORCE_TCP")
    fabric.cards = []
    with pytest.raises(UserError, match=r"transfer\.protocol: got rdma, .* finds no RDMA device on this host"):
        backend_of()
    backend_of(TransferProtocol.TCP)
    assert [engine.protocol for engine in fabric.engines.values()] == ["rdma", "tcp"]


def test_only_mooncake_talks_rdma() -> None:
    config = {"transfer": {"protocol": "rdma"}}
    assert [str(problem) for problem in config_problems(DeployConfig.model_validate(config))] == [
        "transfer.protocol: got rdma with transfer.backend = shared_memory; allowed: tcp; rdma needs backend mooncake"
    ]
    config["transfer"]["backend"] = "mooncake"
    assert config_problems(DeployConfig.model_validate(config)) == []
