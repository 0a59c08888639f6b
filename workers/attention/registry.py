"""Attention backends by name; each is imported when first asked for, so that a machine needs only its own libraries."""

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch

from cluster.spec.config import AttentionSetting
from cluster.spec.errors import UserError
from workers.attention.interface import AttentionBackend
from workers.native.compile import CannotCompileError, find_compiler

BACKENDS = {
    "flash_attn": "workers.attention.flash_attn_backend:FlashAttention",
    "native": "workers.attention.native_backend:NativeAttention",
    "torch": "workers.attention.torch_backend:TorchAttention",
    "triton": "workers.attention.triton.backend:TritonAttention",
}
_EVERYWHERE = {"cpu": ("torch",), "cuda": ("torch", "triton")}
_IN_BF16 = {"cpu": ("native",), "cuda": ("flash_attn",)}

_log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """A backend, and why it is this one."""

    name: str
    backend: AttentionBackend
    reason: str


def load_backend(name: str) -> AttentionBackend:
    """The backend of a name; UserError lists the known ones, or says what is not installed."""
    if name not in BACKENDS:
        raise UserError(f"unknown attention backend {name!r}; allowed: {', '.join(sorted(BACKENDS))}")
    module, _, attribute = BACKENDS[name].partition(":")
    try:
        backend: AttentionBackend = getattr(import_module(module), attribute)()
    except ImportError as error:
        raise UserError(f"attention backend {name!r} cannot be loaded: {error}") from error
    return backend


def choose_backend(setting: AttentionSetting, device: torch.device, dtype: torch.dtype) -> Choice:
    """What ``resources.attention`` asks for, or for ``auto`` the fastest on this machine; compiles it if need be.

    Raises:
        UserError: what is asked for is not for this device or dtype, or is not installed.
    """
    name = setting.value
    if setting is AttentionSetting.AUTO:
        return _fastest(device, dtype)
    allowed = _EVERYWHERE[device.type] + (_IN_BF16[device.type] if dtype == torch.bfloat16 else ())
    if name not in allowed:
        on = f"{device.type} in {dtype}".replace("torch.", "")
        raise UserError(f"resources.attention: got {name}; allowed on {on}: auto, {', '.join(sorted(allowed))}")
    try:
        return Choice(name, load_backend(name), "asked for")
    except CannotCompileError as error:
        raise UserError(f"resources.attention: got native; {error}{error.mend and f'; {error.mend}'}") from error


def _why_not_flash_attn(dtype: torch.dtype) -> str:
    """Looks for the package only, since it is long in coming."""
    if dtype != torch.bfloat16:
        return "flash_attn is for bf16"
    if find_spec("flash_attn") is None:
        return "flash_attn is not installed"
    return "flash_attn, which is installed, does only pages of multiples of 256 tokens, and whole runs"


def _fastest(device: torch.device, dtype: torch.dtype) -> Choice:
    if device.type == "cuda":
        why_not = _why_not_flash_attn(dtype)
        return Choice("triton", load_backend("triton"), f"it reads pages of any size where they lie; {why_not}")
    if dtype != torch.bfloat16:
        return Choice("torch", load_backend("torch"), "the CPU, in fp32")
    try:
        return Choice("native", load_backend("native"), f"the CPU, in bf16, with {find_compiler().kind.name}")
    except CannotCompileError as error:
        level = logging.WARNING if error.mend else logging.INFO
        _log.log(level, "attention in plain torch, at half the speed: %s%s", error, error.mend and f"; {error.mend}")
        return Choice("torch", load_backend("torch"), f"the CPU, in bf16, without native: {error}")
