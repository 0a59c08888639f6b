"""Work that a GPU would be given, counted while kernels are interpreted."""

from collections import Counter
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter


class CountedLaunches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of kernels by name, and of torch calls that compute or copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._in_kernel = False
        call = interpreter.GridExecutor.__call__

        def noted(executor: Any, *args: Any, **kwargs: Any) -> None:
            self.counts[executor.fn.__name__] += 1
            self._in_kernel = True
            call(executor, *args, **kwargs)
            self._in_kernel = False

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", noted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._in_kernel and (func._schema.is_mutable or _is_computed(func.overloadpacket.__name__, out, args)):
            self.counts[func.overloadpacket.__name__] += 1
        return out


def _is_computed(name: str, out: Any, args: Any) -> bool:
    """Return whether a call computes something, unlike views and uninitialized tensors."""
    if not isinstance(out, Tensor) or "empty" in name:
        return False
    return not any(isinstance(x, Tensor) and _begin(x) == _begin(out) for x in args)


def _begin(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
