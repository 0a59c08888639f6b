"""What everything that goes over the wire is: plain data, frozen, MessagePack."""

from typing import TypeVar

import msgspec

_T = TypeVar("_T")


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message: frozen, keyword-only."""


class Tagged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A message, which may stand alone on the wire; its class name is its tag."""


def decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    """What some bytes say.

    Raises:
        msgspec.DecodeError: and nothing else, whatever the bytes are.
    """
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec lets these through
        raise msgspec.DecodeError(str(error)) from error
