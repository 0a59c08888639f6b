"""What `baton up` refuses before Ray starts, in the words of `baton plan`, and what it only warns of."""

from pathlib import Path

import pytest

from cluster.cli.start_check import check_model
from cluster.machine_memory import MachineMemory
from cluster.spec.errors import UserError
from cluster.spec.loader import parse_config
from tests.fakes.checkpoints import make_checkpoint

GIB = 1024**3
ROOMY = MachineMemory(total=64 * GIB, available=64 * GIB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", num_hidden_layers=2)


def machine(total_gib: float, available_gib: float, *, is_limited: bool = False) -> MachineMemory:
    return MachineMemory(total=int(total_gib * GIB), available=int(available_gib * GIB), is_limited=is_limited)


def said(text: str, folder: Path, memory: MachineMemory = ROOMY) -> list[str]:
    lines: list[str] = []
    check_model(parse_config(text, "f.yaml"), folder, lines.append, memory)
    return lines


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prefill: {parallel: {cp: 2, moe_dp: 2}}", "prefill.parallel.moe_dp: got 2; allowed: 1, since"),
        ("decode: {parallel: {tp: 2, ep: 2}}", "decode.parallel.ep: got 2; allowed: 1, since"),
        ("prefill: {parallel: {pp: 3}}", "prefill.parallel.pp: got 3; allowed: at most the model's 2 layers"),
        ("prefill: {parallel: {tp: 5}}", "prefill.parallel.tp: got 5; allowed: a divisor of"),
        ("resources: {device: cuda}\nprefill: {parallel: {pp: 3}}", "at most the model's 2 layers"),
        ("model: {max_context: 1000000000}", "model.max_context: got 1000000000; allowed: at most"),
        ("kv: {memory_gib: 0.5}\nresources: {machine_memory_gib: 1}", "resources.machine_memory_gib: got 1; allowed"),
    ],
)
def test_what_plan_refuses_does_not_start(text: str, words: str, folder: Path) -> None:
    with pytest.raises(UserError) as refused:
        said(text, folder)
    assert words in str(refused.value)


def test_a_gpu_is_not_reckoned_with_before_its_worker_asks_it(folder: Path) -> None:
    assert said("resources: {device: cuda, gpu_memory_gib: 0.001}", folder) == []


SIX_GIB = "kv: {memory_gib: 3}\nprefill: {replicas: 1}"


def test_what_this_machine_can_never_hold_does_not_start(folder: Path) -> None:
    with pytest.raises(UserError, match=r"this machine has 5 GiB of memory; allowed: at least 6.*, for 1 prefill wor"):
        said(SIX_GIB, folder, machine(5, 4))
    with pytest.raises(UserError, match=r"^this container has 5 GiB of memory; allowed: at least 6"):
        said(SIX_GIB, folder, machine(5, 4, is_limited=True))
    assert said(SIX_GIB, folder, machine(7, 8)) == []


def test_what_is_not_free_now_starts_with_a_warning(folder: Path) -> None:
    (line,) = said(SIX_GIB, folder, machine(8, 4))
    assert line.startswith("memory: 4 GiB are available on this machine now; wanted: at least 6")
    assert said(SIX_GIB, folder, machine(8, 7)) == []


@pytest.mark.parametrize("elsewhere", ["transfer: {backend: mooncake}", "resources: {machine_memory_gib: 8}"])
def test_this_machine_is_not_asked_where_another_was_told_of_or_there_are_several(elsewhere: str, folder: Path) -> None:
    assert said(f"{SIX_GIB}\n{elsewhere}", folder, machine(1, 1)) == []
    assert said(SIX_GIB, folder, machine(0, 0)) == []
