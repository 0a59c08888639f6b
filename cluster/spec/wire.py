"""Wire format of messages: frozen structs in MessagePack, with packed token ids."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import msgspec

_T = TypeVar("_T")
ID_BYTES = 4
"""Number of bytes per token id; ids are signed and little-endian."""
_LOWEST, _HIGHEST = -(2**31), 2**31 - 1


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a message."""


class Tagged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Complete message, tagged with its class name."""


def decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    """Decode bytes. Raises msgspec.DecodeError, and no other error, if they are invalid."""
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec does not translate these errors
        raise msgspec.DecodeError(str(error)) from error


class TokenIds(Sequence[int]):
    """Immutable sequence of packed token ids, which become integers only when read."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        """Wrap packed ids. Raises ValueError if the length is not a multiple of ``ID_BYTES``."""
        if len(packed) % ID_BYTES:
            raise ValueError(f"token ids: got {len(packed)} bytes; allowed: a multiple of {ID_BYTES}")
        self.packed = packed

    @classmethod
    def of(cls, token_ids: Iterable[int]) -> "TokenIds":
        """Pack ids. Raises ValueError if one is out of range."""
        if isinstance(token_ids, TokenIds):
            return token_ids
        ids = token_ids if isinstance(token_ids, list) else [*token_ids]
        try:
            # Three times as fast as array.array.
            return cls(struct.pack(f"<{len(ids)}i", *ids))
        except struct.error as error:
            raise ValueError(f"token ids: allowed: {_LOWEST} to {_HIGHEST}") from error

    def __len__(self) -> int:
        return len(self.packed) // ID_BYTES

    def __iter__(self) -> Iterator[int]:
        return iter(struct.unpack(f"<{len(self)}i", self.packed))

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> "TokenIds": ...

    def __getitem__(self, index: int | slice) -> "int | TokenIds":
        selected = range(len(self))[index]
        if isinstance(selected, int):
            return int.from_bytes(self.packed[selected * ID_BYTES : (selected + 1) * ID_BYTES], "little", signed=True)
        if selected.step != 1:
            return TokenIds.of(self[each] for each in selected)
        return TokenIds(self.packed[selected.start * ID_BYTES : selected.stop * ID_BYTES])

    def __add__(self, others: Iterable[int]) -> "TokenIds":
        return TokenIds(self.packed + TokenIds.of(others).packed)

    def __eq__(self, other: object) -> bool:
        return self.packed == other.packed if isinstance(other, TokenIds) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.packed)

    def __repr__(self) -> str:
        return f"TokenIds.of({[*self]})"


def to_wire(value: Any) -> bytes:
    """Encode a type that MessagePack lacks: the ``enc_hook`` of messages."""
    if isinstance(value, TokenIds):
        return value.packed
    raise NotImplementedError(f"messages cannot contain a {type(value).__name__}")


def from_wire(kind: type[Any], value: Any) -> Any:
    """Reverse ``to_wire``: the ``dec_hook`` of messages. Raises TypeError or ValueError if the value does not fit."""
    if kind is TokenIds and isinstance(value, bytes):
        return TokenIds(value)
    raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
