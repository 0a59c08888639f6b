"""Devices that stand in for a GPU on a machine without one."""

import pytest
import torch
from torch import Tensor

from workers import device
from workers.device import CPU, CpuDevice, Device, GpuDevice


def kernels_on_cpu(patch: pytest.MonkeyPatch, *, on: bool = True) -> None:
    """Use kernels on the CPU, where Triton interprets them; with ``on=False``, use torch again."""
    patch.setattr(CPU, "has_kernels", on)


class CpuWithKernels(CpuDevice):
    """CPU that a runner warms up like a GPU."""

    has_kernels = True


class GpuOnHost(CpuDevice):
    """CPU whose memory is measured like a GPU's."""

    has_own_memory = True
    used_bytes = GpuDevice.used_bytes
    measure_memory = GpuDevice.measure_memory


class MetaDevice(Device):
    """Device of tensors without content, which raise an error where the host would wait for a GPU."""

    name = "meta"
    torch_device = torch.device("meta")

    def __init__(self, *, has_kernels: bool) -> None:
        self.has_kernels = has_kernels

    def put(self, on_host: Tensor) -> Tensor:
        assert on_host.device == CPU.torch_device
        return on_host.to("meta")


def use_meta_device(patch: pytest.MonkeyPatch, *, has_kernels: bool = False) -> MetaDevice:
    """Compute with meta tensors."""
    meta = MetaDevice(has_kernels=has_kernels)
    patch.setitem(device._DEVICES, torch.device("meta"), meta)
    return meta
