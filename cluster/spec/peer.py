"""Who somebody is to others."""

from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.wire import Struct


class Peer(Struct, frozen=True):
    """A replica, or a router, as seen from outside: who it is, which start of it, and where it listens."""

    replica: ReplicaId
    incarnation: Incarnation
    address: str
    """Channel address; of a replica its leader's."""
