"""Chained hash of a page's tokens: equal keys mean equal tokens from the start of the prompt, for one tenant."""

import hashlib
import struct
from collections.abc import Sequence

from cluster.spec.token_ids import ID_BYTES, TokenIds

_KEY_BYTES = 16


def page_keys(token_ids: Sequence[int], page_size: int, salt: str = "") -> list[bytes]:
    """Return the 16-byte key of every full page, in order; a partial last page has none. Salts keep tenants apart."""
    keys: list[bytes] = []
    extend_page_keys(keys, token_ids, page_size, salt)
    return keys


def extend_page_keys(keys: list[bytes], token_ids: Sequence[int], page_size: int, salt: str = "") -> None:
    """Append the keys of the full pages that follow the known ones."""
    data = TokenIds.of(token_ids[len(keys) * page_size : len(token_ids) // page_size * page_size]).packed
    key = keys[-1] if keys else _seed(salt)
    fresh = hashlib.blake2b(digest_size=_KEY_BYTES)
    for (page,) in struct.iter_unpack(f"{page_size * ID_BYTES}s", data):
        hashed = fresh.copy()  # cheaper than a new hash object
        hashed.update(key + page)
        key = hashed.digest()
        keys.append(key)


def first_place(key: bytes) -> int:
    """Return the owner number of page 0 under its key. Page j has that number plus j; of n parts, this modulo n owns
    it.
    """
    return int.from_bytes(key[:8], "little")


def lifetime_key(key: bytes, lifetime: int) -> bytes:
    """Return the key of a lifetime's page of the same tokens; the first lifetime has the chained key itself."""
    return key + bytes([lifetime]) if lifetime else key


def lifetime_of(key: bytes) -> int:
    """Return the lifetime whose page has this key."""
    return key[_KEY_BYTES] if len(key) > _KEY_BYTES else 0


def owner_base(token_ids: Sequence[int], page_size: int, parts: int, salt: str = "") -> int:
    """Return the part that owns page 0 when pages are divided over parts; 0 without a full page."""
    first = page_keys(token_ids[:page_size], page_size, salt)
    return first_place(first[0]) % parts if first else 0


def _seed(salt: str) -> bytes:
    """Return the seed of the key chain. Salts hash under their own tag and cannot collide with page keys."""
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"salt").digest() if salt else b""
