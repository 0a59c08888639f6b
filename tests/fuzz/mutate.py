"""Turn valid inputs into mostly invalid ones: change bytes, or change a value in a tree and encode it again."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**63 - 1, 2**64 - 1, 2**70, 0.5, -0.0, 1e308, "", "x", "é\u2028\U0001f600", "-1", [],
    {}, [[]], {"": None}, "a" * 5000, [0] * 500, "nan", "../../etc/passwd",
)  # fmt: skip
ODD_BYTES = (
    b"",
    b"\x00",
    b"\xff",
    b"\xc1",
    b"\x80\x80",
    b"\n",
    b"\r\n",
    b"{",
    b"[" * 2000,
    b'"',
    b"\xef\xbb\xbf",
    b"\x91" * 2000,
)
_MOST_BYTES = 1 << 17


@dataclass(frozen=True)
class Codec:
    """Conversion of an input to a tree of dictionaries, lists and values, and back."""

    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes]


def mutate(rng: random.Random, seeds: list[bytes], codec: Codec | None) -> bytes:
    """Return an input that is a few changes away from a seed."""
    data = rng.choice(seeds)
    if codec is not None and rng.random() < 0.5:
        tree = codec.read(data)
        for _ in range(rng.randint(1, 3)):
            tree = _changed(rng, tree)
        try:
            data = codec.write(tree)
        except (ValueError, TypeError, OverflowError):
            return data  # the tree cannot be encoded
    if codec is None or rng.random() < 0.6:
        for _ in range(rng.randint(1, 4)):
            data = _changed_bytes(rng, data, seeds)
    return data[:_MOST_BYTES]


def _changed(rng: random.Random, tree: Any) -> Any:
    """Return the tree with one value replaced by another one, removed or wrapped."""
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        key = rng.choice(list(tree))
        rest = {name: value for name, value in tree.items() if name != key}
        match rng.randrange(6):
            case 0:
                return rest
            case 1:
                return {**rest, rng.choice(["", "x", key + key if isinstance(key, str) else "y"]): tree[key]}
            case _:
                return {**tree, key: _changed(rng, tree[key])}
    if isinstance(tree, list) and tree and rng.random() < 0.8:
        index = rng.randrange(len(tree))
        match rng.randrange(6):
            case 0:
                return tree[:index] + tree[index + 1 :]
            case 1:
                return tree * 3
            case _:
                return [*tree[:index], _changed(rng, tree[index]), *tree[index + 1 :]]
    return rng.choice([rng.choice(ODD_VALUES), [tree], {"x": tree}, rng.randint(-(2**62), 2**62)])


def _changed_bytes(rng: random.Random, data: bytes, seeds: list[bytes]) -> bytes:
    offset = rng.randint(0, len(data))
    other = rng.choice(seeds)
    match rng.randrange(6):
        case 0:
            return data[:offset]
        case 1 if data:
            offset = rng.randrange(len(data))
            return data[:offset] + bytes([data[offset] ^ (1 << rng.randrange(8))]) + data[offset + 1 :]
        case 2:
            return data[:offset] + rng.choice(ODD_BYTES) + data[offset:]
        case 3:
            return data[:offset] + other[rng.randint(0, len(other)) :]
        case 4:
            return data[:offset] + data[offset + rng.randint(0, 8) :]
        case _:
            return data[:offset] + data[offset : offset + rng.randint(0, 64)] * rng.choice([2, 3, 100]) + data[offset:]
