"""KV of a model and of one worker, as data that can travel: the model's groups, its geometry, the layout of a pool."""

import hashlib

import msgspec


class KvPart(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that a layer stores for each token and head: K or V, a latent, an indexer's keys."""

    name: str
    dim: int
    """Elements per token and head."""
    dtype: str
    """``float32`` or ``bfloat16``."""


class KvGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of a model that store the same parts, for the same number of heads and the same lifetime."""

    name: str
    num_heads: int
    layers: tuple[int, ...]
    """Layer numbers of the model, ascending."""
    parts: tuple[KvPart, ...]
    window: int | None = None
    """Tokens that a later token can still see, itself included; None if all. Groups of one window share page ids."""


class KvGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """The KV shape of the whole model, not of one rank's cut: replicas of unequal TP or PP agree on it."""

    model: str
    """Name under which the model is served."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """``float32`` or ``bfloat16``."""
    page_size: int
    """Tokens per page."""

    @property
    def digest(self) -> str:
        """Short hash that is equal exactly when two geometries are."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).hexdigest()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes over all layers and heads."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


class PoolLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's page pool ``[page, kv_head, layer, k_or_v, slot, head_dim]`` and the part of the model in it."""

    num_pages: int
    """Pages that can be given to requests; one more follows in memory, for padding."""
    first_head: int
    num_heads: int
    first_layer: int
    num_layers: int
    page_size: int
    head_dim: int
    itemsize: int
    """Bytes of one element."""

    @property
    def layer_bytes(self) -> int:
        """K and V of one layer, of one head, of one page."""
        return 2 * self.page_size * self.head_dim * self.itemsize

    @property
    def head_bytes(self) -> int:
        """All layers of one head of one page."""
        return self.num_layers * self.layer_bytes

    @property
    def page_bytes(self) -> int:
        """One whole page."""
        return self.num_heads * self.head_bytes

    @property
    def pool_bytes(self) -> int:
        """The whole pool, padding page included."""
        return (self.num_pages + 1) * self.page_bytes


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold a number of tokens."""
    return -(-num_tokens // page_size)
