"""Placement: every worker gets a bundle, replicas stay together, and errors say with numbers what does not fit."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cluster.actors import Machine
from cluster.placement import ReplicaPlacement, place
from cluster.spec.config import (
    DecodeConfig,
    DecodeParallelConfig,
    DeployConfig,
    Device,
    ParallelConfig,
    PrefillConfig,
    ResourcesConfig,
    TransferBackendName,
    TransferConfig,
)
from cluster.spec.errors import ConfigError
from cluster.spec.ids import replica_id


def deployment(
    prefill: tuple[int, int],
    decode: tuple[int, int] = (1, 1),
    *,
    backend: TransferBackendName = TransferBackendName.MOONCAKE,
    device: Device = Device.CPU,
    cpus: float = 1.0,
    gpus: float = 1.0,
) -> DeployConfig:
    """Return a deployment with (replicas, workers per replica) for each role."""
    return DeployConfig(
        prefill=PrefillConfig(replicas=prefill[0], parallel=ParallelConfig(cp=prefill[1])),
        decode=DecodeConfig(replicas=decode[0], parallel=DecodeParallelConfig(tp=decode[1])),
        transfer=TransferConfig(backend=backend),
        resources=ResourcesConfig(device=device, cpus_per_worker=cpus, gpus_per_worker=gpus),
    )


def machines(*cpus: float, gpus: float = 0) -> list[Machine]:
    return [
        Machine(node_id=f"n{index}", address=f"10.0.0.{index}", cpus=free, gpus=gpus) for index, free in enumerate(cpus)
    ]


def nodes_of(placements: list[ReplicaPlacement]) -> dict[str, list[str]]:
    return {placement.replica: [bundle.node_id for bundle in placement.bundles] for placement in placements}


def test_replica_stays_on_one_machine() -> None:
    placements = place(deployment((2, 4), (2, 1)), machines(5, 5))
    assert nodes_of(placements) == {
        "prefill-0": ["n0"] * 4,
        "prefill-1": ["n1"] * 4,
        "decode-0": ["n0"],
        "decode-1": ["n1"],
    }


def test_replica_larger_than_a_machine_takes_the_emptiest_ones() -> None:
    assert nodes_of(place(deployment((1, 6)), machines(1, 4, 3)))["prefill-0"] == ["n1"] * 4 + ["n2"] * 2


def test_large_replicas_choose_first() -> None:
    assert nodes_of(place(deployment((1, 1), (1, 4)), machines(4, 1))) == {"prefill-0": ["n1"], "decode-0": ["n0"] * 4}


def test_bundles_have_a_workers_resources() -> None:
    (prefill, _) = place(deployment((1, 2), device=Device.CUDA, cpus=0.5), machines(8, gpus=3))
    assert [(bundle.cpus, bundle.gpus) for bundle in prefill.bundles] == [(0.5, 1.0), (0.5, 1.0)]


def test_fractions_of_a_cpu_fill_a_machine() -> None:
    assert len(place(deployment((1, 9), cpus=0.1), machines(1.0))) == 2


@pytest.mark.parametrize(
    ("gpus", "there", "most"), [(0.5, 3, 6), (0.4, 3, 6), (0.6, 3, 3), (0.25, 1.5, 6), (0.1, 1, 10), (1.0, 2.5, 2)]
)
def test_no_worker_spans_gpus(gpus: float, there: float, most: int) -> None:
    nodes = machines(64, gpus=there)
    (prefill, _) = place(deployment((1, most - 1), device=Device.CUDA, gpus=gpus), nodes)
    assert [bundle.gpus for bundle in prefill.bundles] == [gpus] * (most - 1)
    with pytest.raises(ConfigError, match=f"and {gpus:g} GPU each; capacity for {most} workers"):
        place(deployment((1, most), device=Device.CUDA, gpus=gpus), nodes)


def test_workers_that_reserve_nothing_fit_anywhere() -> None:
    placements = place(deployment((1, 40), cpus=0.0), machines(0.0))
    assert nodes_of(placements)["prefill-0"] == ["n0"] * 40


def test_one_replica_is_placed_again_on_what_is_left() -> None:
    config = deployment((2, 2), (1, 1))
    assert nodes_of(place(config, machines(1, 2), only=[replica_id("prefill", 1)])) == {"prefill-1": ["n1", "n1"]}


def test_shared_memory_keeps_everything_on_the_first_machine_that_holds_it() -> None:
    config = deployment((1, 2), backend=TransferBackendName.SHARED_MEMORY)
    assert {node for nodes in nodes_of(place(config, machines(2, 3, 8))).values() for node in nodes} == {"n1"}


@pytest.mark.parametrize(
    ("config", "nodes", "message"),
    [
        (
            deployment((2, 4)),
            machines(4, 3.5),
            "resources: wanted: 9 workers with 1 CPUs each; capacity for 7 workers; "
            "free: 10.0.0.0 4 CPUs 0 GPUs, 10.0.0.1 3.5 CPUs 0 GPUs",
        ),
        (
            deployment((1, 2), device=Device.CUDA),
            machines(64, gpus=1),
            "resources: wanted: 3 workers with 1 CPUs and 1 GPU each; capacity for 1 workers; "
            "free: 10.0.0.0 64 CPUs 1 GPUs",
        ),
        (
            deployment((1, 1)),
            [],
            "resources: wanted: 2 workers with 1 CPUs each; capacity for 0 workers; free: no machine",
        ),
        (
            deployment((1, 4), backend=TransferBackendName.SHARED_MEMORY),
            machines(4, 4),
            "transfer.backend: shared_memory needs all workers on one machine; wanted: 5 workers with 1 CPUs each; "
            "the largest machine has capacity for 4 workers; free: 10.0.0.0 4 CPUs 0 GPUs, 10.0.0.1 4 CPUs 0 GPUs; "
            "allowed on several machines: mooncake",
        ),
    ],
)
def test_insufficient_resources_are_reported_with_numbers(
    config: DeployConfig, nodes: list[Machine], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        place(config, nodes)
    assert str(caught.value) == message


@settings(max_examples=150, deadline=None)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 6)),
    st.tuples(st.integers(1, 4), st.integers(1, 6)),
    st.lists(st.integers(0, 12), min_size=1, max_size=6),
)
def test_any_feasible_deployment_is_placed(prefill: tuple[int, int], decode: tuple[int, int], cpus: list[int]) -> None:
    num_workers = prefill[0] * prefill[1] + decode[0] * decode[1]
    assume(sum(cpus) >= num_workers)
    placements = place(deployment(prefill, decode), machines(*cpus))
    taken = [bundle.node_id for placement in placements for bundle in placement.bundles]
    assert len(taken) == num_workers
    assert all(taken.count(machine.node_id) <= machine.cpus for machine in machines(*cpus))
    assert [len(placement.bundles) for placement in placements] == [prefill[1]] * prefill[0] + [decode[1]] * decode[0]
