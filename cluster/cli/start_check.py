"""Checks of `baton up` before anything starts: the model, its parallel layouts and this machine's memory."""

from collections.abc import Callable
from pathlib import Path

from cluster.machine_memory import MachineMemory, machine_memory
from cluster.planner.memory import memory_lack, model_problems
from cluster.planner.model import ModelFacts, facts_of
from cluster.spec.config import DeployConfig, Device, TransferBackendName
from cluster.spec.errors import ConfigError, UserError
from cluster.spec.pool import GIB


def check_model(
    config: DeployConfig, folder: Path, say: Callable[[str], None], memory: MachineMemory | None = None
) -> None:
    """Reject what cannot run; ``say`` receives a warning if the machine has enough memory but too little is free.

    Raises:
        UserError: the engine cannot run the model, its layout or KV dtype is invalid, or the machine is too small.
    """
    model = facts_of(config, folder)
    if problems := model_problems(config, model, with_gpu=False):
        raise ConfigError(problems)
    resources, one_machine = config.resources, config.transfer.backend is TransferBackendName.SHARED_MEMORY
    if one_machine and resources.device is Device.CPU and resources.machine_memory_gib is None:
        _check_machine(config, model, say, memory or machine_memory())


def _check_machine(config: DeployConfig, model: ModelFacts, say: Callable[[str], None], memory: MachineMemory) -> None:
    if not memory.total:
        return
    total_gib, available_gib = memory.total / GIB, memory.available / GIB
    if lack := memory_lack(config, model, total_gib):
        raise UserError(f"{memory.owner} has {total_gib:.4g} GiB of memory; allowed: {lack}")
    if lack := memory_lack(config, model, available_gib):
        say(f"memory: {available_gib:.4g} GiB are available on {memory.owner} now; wanted: {lack}")
