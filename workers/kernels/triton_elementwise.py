"""Elementwise kernels of GPUs."""

from workers.kernels.rms_norm import add_rms_norm, rms_norm
from workers.kernels.rotate import rotate
from workers.kernels.store_kv import store_kv
from workers.kernels.swiglu import swiglu

__all__ = ["add_rms_norm", "rms_norm", "rotate", "store_kv", "swiglu"]
