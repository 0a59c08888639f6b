"""Choice of the attention backend for a setting and a device, and the errors if it is unavailable."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from cluster.spec.config import AttentionSetting
from cluster.spec.errors import UserError
from cluster.spec.kv import key_value_group
from tests.fakes.checkpoints import make_checkpoint
from workers.attention.interface import Feature
from workers.attention.registry import choose_backend, needs_of
from workers.device import CPU, GPU, Device, GpuDevice
from workers.engine.native_kernels import choose_kernels
from workers.engine.weights import load_model
from workers.kernels import elementwise
from workers.kernels.elementwise import ElementwiseKernels
from workers.native.compile import find_compiler
from workers.native.library import Library


def test_auto_depends_on_the_device() -> None:
    assert choose_backend(AttentionSetting.AUTO, GPU, torch.bfloat16).name == "triton"


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_auto_on_a_cpu_is_the_compiled_code(dtype: torch.dtype) -> None:
    choice = choose_backend(AttentionSetting.AUTO, CPU, dtype)
    assert (choice.name, choice.reason) == ("native", f"compiled for {find_compiler().kind.name}")


def test_a_named_backend_is_used() -> None:
    for setting, device in (
        (AttentionSetting.TORCH, CPU),
        (AttentionSetting.TORCH, GPU),
        (AttentionSetting.TRITON, GPU),
    ):
        choice = choose_backend(setting, device, torch.bfloat16)
        assert (choice.name, choice.reason) == (setting.value, "set in resources.attention")


@pytest.mark.parametrize(
    ("setting", "device", "dtype", "message"),
    [
        ("triton", CPU, torch.bfloat16, "got triton; allowed on cpu in bfloat16: auto, native, torch"),
        ("native", GPU, torch.bfloat16, "got native; allowed on cuda in bfloat16: auto, flash_attn, torch, triton"),
        ("flash_attn", GPU, torch.float32, "got flash_attn; allowed on cuda in float32: auto, torch, triton"),
    ],
)
def test_a_backend_for_another_device_is_refused(
    setting: str, device: Device, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(UserError, match=f"resources.attention: {message}"):
        choose_backend(AttentionSetting(setting), device, dtype)


def test_a_model_that_needs_more_than_a_backend_has() -> None:
    message = (
        "resources.attention: got native, which lacks sliding windows; "
        "allowed on cpu in bfloat16 for this model: auto, torch"
    )
    with pytest.raises(UserError, match=message):
        choose_backend(AttentionSetting.NATIVE, CPU, torch.bfloat16, {Feature.WINDOW})
    some = {Feature.WINDOW}
    choice = choose_backend(AttentionSetting.AUTO, CPU, torch.bfloat16, some)
    lacks = "native lacks sliding windows"
    assert (choice.name, choice.reason) == ("torch", lacks)
    assert choose_backend(AttentionSetting.AUTO, GPU, torch.bfloat16, some).name == "triton"


def test_keys_that_are_too_wide_for_kernels() -> None:
    choice = choose_backend(AttentionSetting.AUTO, GPU, torch.bfloat16, {Feature.WIDE_KEYS})
    assert (choice.name, choice.reason) == (
        "torch",
        "triton lacks keys wider than 256 elements, or than 576 with their values inside",
    )
    for setting in (AttentionSetting.TRITON, AttentionSetting.FLASH_ATTN):
        message = f"got {setting}, which lacks keys wider than 256 elements.*; allowed on cuda .*: auto, torch"
        with pytest.raises(UserError, match=message):
            choose_backend(setting, GPU, torch.bfloat16, {Feature.WIDE_KEYS})


def test_needs_follow_from_the_groups_that_a_model_stores() -> None:
    plain = key_value_group(range(2), 2, 8, "bfloat16")
    k, v = plain.parts
    for groups, needs in (
        ([plain], set()),
        ([plain, replace(plain, window=4)], {Feature.WINDOW}),
        ([replace(plain, parts=(k, replace(v, dim=6)))], set()),
        ([replace(plain, parts=(replace(k, dim=512), v))], {Feature.WIDE_KEYS}),
        ([replace(plain, parts=(replace(k, name="latent", dim=576),))], set()),
        ([replace(plain, parts=(replace(k, name="latent", dim=640),))], {Feature.WIDE_KEYS}),
    ):
        assert needs_of(groups, CPU) == needs


@pytest.mark.parametrize(("kib", "dim", "name"), [(99, 576, "torch"), (99, 256, "triton"), (163, 576, "triton")])
def test_wide_latents_need_shared_memory(kib: int, dim: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ada has 99 KiB, Ampere 163."""
    monkeypatch.setattr(GpuDevice, "shared_bytes", kib << 10)
    plain = key_value_group(range(2), 1, dim, "bfloat16")
    needs = needs_of([replace(plain, parts=(replace(plain.parts[0], name="latent"),))], GPU)
    assert choose_backend(AttentionSetting.AUTO, GPU, torch.bfloat16, needs).name == name


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "workers.attention.flash_attn_backend", raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    with pytest.raises(UserError, match="'flash_attn' cannot be loaded"):
        choose_backend(AttentionSetting.FLASH_ATTN, GPU, torch.bfloat16)


@pytest.mark.native
def test_native_code_computes_what_is_not_attention_even_if_attention_is_left_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    model = load_model(make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2, **windows))
    geometry = model.config.kv_geometry("model", "float32", 4)
    registered = dict[tuple[Device, torch.dtype], ElementwiseKernels]()
    monkeypatch.setattr(elementwise, "_REGISTERED", registered)
    assert choose_kernels(AttentionSetting.TORCH, model, geometry).name == "torch"
    assert not registered
    assert choose_kernels(AttentionSetting.AUTO, model, geometry).name == "torch"
    assert isinstance(registered[CPU, torch.float32], Library)
