"""KV groups and geometry of a model, the layout of a rank's pool, and the keys of pages."""

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence

import msgspec

from cluster.spec.wire import ID_BYTES, TokenIds

FULL_ATTENTION = "full_attention"
"""Name of the KV group of full attention, as in transformers' `layer_types`."""

SLIDING_ATTENTION = "sliding_attention"
"""Name of the KV group of sliding-window attention."""

INDEXED_ATTENTION = "indexed_attention"
"""Name of the KV group of layers that store an indexer's keys, as in transformers' `layer_types`."""

INDEX_PART = "index"
"""Name of the part that holds an indexer's keys."""

NO_PAGE = -1
"""Placeholder in a list of pages for a page that no later token can see."""

_KEY_BYTES = 16

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class KvPart(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that a layer stores per token and head: K, V, a latent, or an indexer's keys."""

    name: str
    dim: int
    """Number of elements per token and head."""
    dtype: str
    """Number format of an element, one of ``DTYPE_BYTES``."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token of one head."""
        return self.dim * DTYPE_BYTES[self.dtype]


class KvGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of a model that store the same parts for the same number of heads."""

    name: str
    num_heads: int
    layers: tuple[int, ...]
    """Layer numbers of the model, ascending."""
    parts: tuple[KvPart, ...]
    window: int | None = None
    """Number of most recent tokens that a token can see, itself included; None for all."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token of one head in one layer."""
        return sum(part.slot_bytes for part in self.parts)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all heads and layers."""
        return self.num_heads * len(self.layers) * self.slot_bytes

    def __str__(self) -> str:
        parts = " + ".join(f"{part.name} {part.dim}" for part in self.parts)
        dtypes = "/".join(dict.fromkeys(part.dtype for part in self.parts))
        window = f", window {self.window}" if self.window else ""
        heads, layers = counted(self.num_heads, "head"), counted(len(self.layers), "layer")
        return f"{self.name} ({layers}, {heads}, {parts} {dtypes}{window})"


class Lifetime(msgspec.Struct, frozen=True):
    """KV groups that are kept for the same time and share one list of pages per request."""

    window: int | None
    """Number of most recent tokens that a token can see, itself included; None for all."""

    def first_page(self, num_tokens: int, page_size: int) -> int:
        """Return the first page that tokens after the first ``num_tokens`` can see."""
        return 0 if self.window is None else max(0, num_tokens - self.window + 1) // page_size


class KvGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """KV shape of the whole model, which is the same for replicas with different TP or PP sizes."""

    model: str
    """Name under which the model is served."""
    num_layers: int
    """Number of layers of the model, with or without KV."""
    groups: tuple[KvGroup, ...]
    page_size: int

    @property
    def lifetimes(self) -> tuple[Lifetime, ...]:
        """Lifetimes, longest first. The first one keeps all pages: it serves the prefix cache."""
        return (Lifetime(None), *map(Lifetime, self._windows[1:]))

    def lifetime_of(self, group: KvGroup) -> int:
        return self._windows.index(group.window)

    @property
    def _windows(self) -> list[int | None]:
        return sorted({group.window for group in self.groups}, key=lambda window: -(window or math.inf))

    @property
    def digest(self) -> str:
        """Short hash for comparing geometries."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).hexdigest()

    @property
    def dtypes(self) -> str:
        return ",".join(sorted({part.dtype for group in self.groups for part in group.parts}))

    @property
    def bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.groups)


class GroupLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One KV group's heads and layers on a rank. Pages store them as ``[head, layer, part, slot, dim]``."""

    name: str
    first_head: int
    num_heads: int
    layers: tuple[int, ...]
    """Layer numbers of the model, ascending, in the order of the ``layer`` axis."""
    parts: tuple[KvPart, ...]
    page_size: int
    lifetime: int = 0
    """Index of the group's lifetime in the geometry."""

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)

    @property
    def layer_bytes(self) -> int:
        return self.page_size * sum(part.slot_bytes for part in self.parts)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in one page, over all layers."""
        return len(self.layers) * self.layer_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_heads * self.head_bytes


class PoolLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's page pool ``[page, byte]``, and the part of the model that it holds.

    A page holds the groups of one lifetime, one after another. All pages have the same size, so that the lifetimes can
    share the memory.
    """

    num_pages: int
    """Number of pages available to requests; the null page, which takes padding, follows them in memory."""
    page_size: int
    first_layer: int
    num_layers: int
    """Number of layers of the rank's pipeline stage, with or without KV."""
    groups: tuple[GroupLayout, ...]
    num_lifetimes: int = 1
    """Number of lifetimes of the whole model; a request has a list of pages for each."""

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def page_bytes(self) -> int:
        return max(self.bytes_of(lifetime) for lifetime in {group.lifetime for group in self.groups})

    def bytes_of(self, lifetime: int) -> int:
        """Return the bytes that a lifetime's groups take in one of its pages."""
        return sum(group.num_bytes for group in self.groups if group.lifetime == lifetime)

    def tokens_in(self, num_pages: int) -> int:
        """Return the length of the prompt that this many pages hold. It needs a page of each lifetime."""
        return num_pages // self.num_lifetimes * self.page_size

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool, including the null page."""
        return (self.num_pages + 1) * self.page_bytes


def key_value_group(
    layers: Iterable[int], num_heads: int, head_dim: int, dtype: str, window: int | None = None
) -> KvGroup:
    """Return the KV group of full or sliding-window attention, with K and V of equal width."""
    parts = tuple(KvPart(name=name, dim=head_dim, dtype=dtype) for name in ("k", "v"))
    return attention_group(layers, num_heads, parts, window)


def attention_group(layers: Iterable[int], num_heads: int, parts: tuple[KvPart, ...], window: int | None) -> KvGroup:
    """Return the KV group of full, indexed or sliding-window attention."""
    name = FULL_ATTENTION if window is None else SLIDING_ATTENTION
    if any(part.name == INDEX_PART for part in parts):
        assert window is None, "an indexer chooses among all keys"
        name = INDEXED_ATTENTION
    return KvGroup(name=name, num_heads=num_heads, layers=tuple(layers), parts=parts, window=window)


def pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as in "1 head" and "2 heads"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def page_keys(token_ids: Sequence[int], page_size: int, salt: str = "") -> list[bytes]:
    """Return the 16-byte key of every full page, in order. Different salts keep tenants' pages apart."""
    keys: list[bytes] = []
    extend_page_keys(keys, token_ids, page_size, salt)
    return keys


def extend_page_keys(keys: list[bytes], token_ids: Sequence[int], page_size: int, salt: str) -> None:
    """Append the keys of the full pages that follow the known ones."""
    data = TokenIds.of(token_ids[len(keys) * page_size : len(token_ids) // page_size * page_size]).packed
    key = keys[-1] if keys else _seed(salt)
    fresh = hashlib.blake2b(digest_size=_KEY_BYTES)
    for (page,) in struct.iter_unpack(f"{page_size * ID_BYTES}s", data):
        hashed = fresh.copy()  # cheaper than a new hash object
        hashed.update(key + page)
        key = hashed.digest()
        keys.append(key)


def first_owner(key: bytes) -> int:
    """Return the owner number of page 0, given its key. The owner of page j is this plus j, modulo the owners."""
    return int.from_bytes(key[:8], "little")


def lifetime_key(key: bytes, lifetime: int) -> bytes:
    """Return the key of a lifetime's page for the tokens of ``key``. The first lifetime uses ``key`` itself."""
    return key + bytes([lifetime]) if lifetime else key


def lifetime_of(key: bytes) -> int:
    return key[_KEY_BYTES] if len(key) > _KEY_BYTES else 0


def owner_base(token_ids: Sequence[int], page_size: int, parts: int, salt: str = "") -> int:
    """Return the part that owns page 0; 0 if there is no full page."""
    first = page_keys(token_ids[:page_size], page_size, salt)
    return first_owner(first[0]) % parts if first else 0


def _seed(salt: str) -> bytes:
    """Return the seed of the key chain. Salts hash under their own tag and cannot collide with page keys."""
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"salt").digest() if salt else b""
