"""Address and identity of a process, as its peers know it."""

from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.wire import Struct


class Peer(Struct, frozen=True):
    """Replica or router as seen from outside: its name, incarnation and address."""

    replica: ReplicaId
    incarnation: Incarnation
    address: str
    """Channel address; for a replica, its leader's."""
