"""Small values shared by the transfer tests."""

import msgspec

from cluster.spec.ids import Incarnation, Peer, ReplicaId, Room
from cluster.spec.kv import KvGeometry, PoolLayout
from cluster.spec.transfer_messages import Ticket
from tests.fakes.kv import kv_geometry, kv_layout

PREFILL = Peer(replica=ReplicaId("prefill-0"), incarnation=Incarnation(3), address="tcp://p:1")
DECODE = Peer(replica=ReplicaId("decode-1"), incarnation=Incarnation(7), address="tcp://d:1")
ROOM = Room(41)


def geometry(**changes: object) -> KvGeometry:
    """Return the KV geometry of a two-layer model."""
    tiny = kv_geometry(model="tiny", num_layers=2, num_kv_heads=4, head_dim=3, dtype="float32", page_size=4)
    return msgspec.structs.replace(tiny, **changes)


def ticket(pages: list[int], num_held_pages: int = 0) -> Ticket:
    return Ticket(
        room=ROOM,
        decode=DECODE,
        prefill_incarnation=PREFILL.incarnation,
        pages=[pages],
        num_held_pages=num_held_pages,
        geometry=geometry(),
    )


def pool(num_pages: int, heads: range, layers: range) -> PoolLayout:
    """Return a pool with one-byte elements: two slots of three elements per page."""
    return kv_layout(
        num_pages=num_pages,
        first_head=heads.start,
        num_heads=len(heads),
        first_layer=layers.start,
        num_layers=len(layers),
        page_size=2,
        head_dim=3,
        itemsize=1,
    )
