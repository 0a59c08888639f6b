"""Types of the identifiers that processes exchange."""

import re
from enum import StrEnum
from typing import NewType

from cluster.spec.wire import Struct

Room = NewType("Room", int)
"""Id under which router, prefill and decode meet for one attempt of one request: 63 random bits, never reused."""

ReplicaId = NewType("ReplicaId", str)
"""Replica name ``<role>-<index>``, for example ``prefill-0``; stable across restarts."""

Incarnation = NewType("Incarnation", int)
"""Number of one start of a replica, which grows with every start: normally the Unix time in milliseconds."""

ROUTER = ReplicaId("router")
"""Name of the first router process, which has incarnations like a replica."""

_REPLICA_ID = re.compile(r"^(prefill|decode)-(\d{1,9})$")


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


def role_of(replica: ReplicaId) -> Role:
    return Role(replica.partition("-")[0])


def router_names(num_processes: int) -> list[ReplicaId]:
    return [ROUTER, *(ReplicaId(f"{ROUTER}-{index}") for index in range(1, num_processes))]


def is_router(name: str) -> bool:
    return name == ROUTER or re.fullmatch(rf"{ROUTER}-\d{{1,9}}", name) is not None


def is_replica(name: str) -> bool:
    return _REPLICA_ID.match(name) is not None


def replica_id(role: str, index: int) -> ReplicaId:
    """Return the id of the index-th replica of a role.

    Raises:
        ValueError: the role is not ``prefill`` or ``decode``, or the index is negative.
    """
    return parse_replica_id(f"{role}-{index}")


def parse_replica_id(text: str) -> ReplicaId:
    """Validate a replica id.

    Raises:
        ValueError: the text is not ``<role>-<index>``.
    """
    if not _REPLICA_ID.match(text):
        raise ValueError(f"replica id {text!r} is not of the form prefill-<n> or decode-<n>")
    return ReplicaId(text)


class Peer(Struct, frozen=True):
    """Name, incarnation and address of a replica or router."""

    replica: ReplicaId
    incarnation: Incarnation
    address: str
    """Channel address; for a replica, that of its leader."""
