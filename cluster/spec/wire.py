"""What everything that goes over the wire is: plain data, frozen, MessagePack."""

import msgspec


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message: frozen, keyword-only."""


class Tagged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A message, which may stand alone on the wire; its class name is its tag."""
