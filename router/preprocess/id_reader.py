"""Reader of token ids in JSON: compiled code on machines with a C++ compiler, otherwise simdjson."""

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import simdjson

from cluster.compilation import CannotCompileError, compile_once, compiler_path
from cluster.spec.wire import TokenIds

_log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("ids.cpp")
_PARSER = simdjson.Parser()
"""Parser of all but the longest lists. A new one takes longer to allocate its memory than to parse 8,192 ids."""
_PARSER_BYTES = 1 << 20
"""Size in bytes above which a list gets a new parser, whose memory is freed afterwards."""


@cache
def compiled_reader() -> Callable[[bytes, int, int, int], int] | None:
    """Return the function of ``ids.cpp``, or None if it cannot be compiled. The first call takes up to a second."""
    try:
        function = ctypes.CDLL(str(compile_once([_SOURCE], compiler_path()))).baton_read_ids
    except (CannotCompileError, OSError) as error:
        _log.info("token ids in requests are read by simdjson, in twice the time: %s", error)
        return None
    function.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    function.restype = ctypes.c_int64
    return function


def read_ids(body: bytes, begin: int, end: int) -> TokenIds | None:
    """Return the ids in a body's JSON array ``[begin, end)``; None if it is empty or contains anything else."""
    reader = compiled_reader()
    if reader is not None:
        ids = np.empty(max(end - begin, 0) // 2, "<i4")
        num_ids = reader(body, begin, end, ids.ctypes.data)
        if num_ids > 0:
            return TokenIds(ids[:num_ids].tobytes())
    return read_with_simdjson(body[begin:end])


def read_with_simdjson(numbers: bytes) -> TokenIds | None:
    """Return the ids in a JSON array; None if it is empty or contains anything else."""
    parser = _PARSER if len(numbers) <= _PARSER_BYTES else simdjson.Parser()
    try:
        wide = np.frombuffer(parser.parse(numbers).as_buffer(of_type="i"), np.uint64)  # type: ignore[union-attr]
    except (TypeError, ValueError, RuntimeError):
        return None  # RuntimeError: numbers of more than 64 bits
    # Negative numbers become the largest unsigned ones.
    is_sound = len(wide) and wide.max() < 2**31
    return TokenIds(wide.astype("<i4").tobytes()) if is_sound else None
