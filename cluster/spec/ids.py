"""Identifiers that travel between processes: types, not bare strings and integers."""

import re
import secrets
from enum import StrEnum
from typing import NewType

from cluster.spec.wire import Struct

Room = NewType("Room", int)
"""Meeting point of one attempt of one request: 63 random bits, never reused."""

ReplicaId = NewType("ReplicaId", str)
"""Replica name ``<role>-<index>``, for example ``prefill-0``; stable across restarts."""

Incarnation = NewType("Incarnation", int)
"""Start number of a replica; a later start has a higher one."""

ROUTER = ReplicaId("router")
"""Name of a router among replicas: it has incarnations, too."""

_REPLICA_ID = re.compile(r"^(prefill|decode)-(\d{1,9})$")


class Role(StrEnum):
    """Purpose of a pool of replicas."""

    PREFILL = "prefill"
    DECODE = "decode"


def role_of(replica: ReplicaId) -> Role:
    return Role(replica.partition("-")[0])


def draw_room() -> Room:
    """Draw a fresh room, uniform over [1, 2**63)."""
    return Room(secrets.randbits(63) or 1)


def router_names(num_processes: int) -> list[ReplicaId]:
    return [ROUTER, *(ReplicaId(f"{ROUTER}-{index}") for index in range(1, num_processes))]


def is_router(name: str) -> bool:
    return name == ROUTER or re.fullmatch(rf"{ROUTER}-\d{{1,9}}", name) is not None


def replica_id(role: str, index: int) -> ReplicaId:
    """Return the id of the index-th replica of a role.

    Raises:
        ValueError: the role is not ``prefill`` or ``decode``, or the index is negative.
    """
    return parse_replica_id(f"{role}-{index}")


def parse_replica_id(text: str) -> ReplicaId:
    """Check a replica id that came from outside.

    Raises:
        ValueError: the text is not ``<role>-<index>``.
    """
    if not _REPLICA_ID.match(text):
        raise ValueError(f"replica id {text!r} is not of the form prefill-<n> or decode-<n>")
    return ReplicaId(text)


class Peer(Struct, frozen=True):
    """Replica or router as seen from outside: its name, incarnation and address."""

    replica: ReplicaId
    incarnation: Incarnation
    address: str
    """Channel address; for a replica, its leader's."""
