"""Library for CPUs with AMX, whose tile registers are a model in plain C++, for CPUs without it."""

import hashlib
from pathlib import Path

from workers.native.compile import KINDS, Kind, runnable_kinds

_MODEL = Path(__file__).with_name("amx_model.h")


def kinds_to_test() -> list[Kind]:
    """Return the kinds that this machine runs, and AMX by its model if it lacks only that."""
    runnable, (amx, without, *_) = runnable_kinds(), KINDS
    if without not in runnable or amx in runnable:
        return runnable
    digest = hashlib.sha256(_MODEL.read_bytes()).hexdigest()  # among the options, so that another model is compiled
    options = *without.options, f"-DMODEL=0x{digest}", "-include", str(_MODEL)
    return [Kind("AMX-model", without.flags, options), *runnable]
