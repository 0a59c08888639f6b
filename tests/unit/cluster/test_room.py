"""Waiting for machines: none where there is room, told once where there is not, and never for longer than a start."""

import pytest

from cluster.actors import Machine
from cluster.launch.room import await_room
from cluster.spec.config import DeployConfig, ResourcesConfig, TransferBackendName, TransferConfig
from cluster.spec.errors import ConfigError
from tests.fakes.ray import FakeSystem

CONFIG = DeployConfig(
    transfer=TransferConfig(backend=TransferBackendName.MOONCAKE), resources=ResourcesConfig(start_timeout_s=60.0)
)
"""One worker of each role."""


def machine(name: str, cpus: float) -> Machine:
    return Machine(node_id=name, address=name, cpus=cpus, gpus=0)


def test_nothing_is_said_where_there_is_room() -> None:
    said: list[str] = []
    system = FakeSystem([machine("head", 2)])
    await_room(system, CONFIG, said.append, lambda: None)
    assert said == []
    assert system.log == []


def test_machines_that_come_later_are_waited_for_and_seen_to_be_wanted() -> None:
    said: list[str] = []
    system = FakeSystem([machine("head", 0)])
    system.joining = [machine("first", 1), machine("second", 1)]
    await_room(system, CONFIG, said.append, lambda: None)
    [line] = said
    assert line.startswith("waiting for machines, 60 s at most: ")
    assert "wanted: 2 workers with 1 CPUs each; room for 0 workers; free: head 0 CPUs" in line
    assert system.log == ["want 2 seats", "want nothing"]


def test_the_wait_ends_with_the_time_to_start_and_says_what_is_missing() -> None:
    config = CONFIG.model_copy(update={"resources": ResourcesConfig(start_timeout_s=0.01)})
    system = FakeSystem([machine("head", 0)])
    with pytest.raises(ConfigError, match="room for 0 workers"):
        await_room(system, config, lambda _: None, lambda: None)


def test_a_signal_ends_the_wait() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    system = FakeSystem([machine("head", 0)])
    system.joining = [machine(f"machine-{n}", 0) for n in range(9)]
    with pytest.raises(KeyboardInterrupt):
        await_room(system, CONFIG, lambda _: None, stop)
