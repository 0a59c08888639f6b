"""Wire format: plain frozen data, in MessagePack."""

from typing import TypeVar

import msgspec

_T = TypeVar("_T")


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a message: frozen, keyword-only."""


class Tagged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Message that can stand alone on the wire; its class name is its tag."""


def decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    """Decode bytes.

    Raises:
        msgspec.DecodeError: the only error, whatever the bytes are.
    """
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec lets these through
        raise msgspec.DecodeError(str(error)) from error
