"""Responses of the bootstrap service other than rows and snapshots, shared by service and client."""

import msgspec

from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.lifecycle import Role
from cluster.spec.registry import RankRow, ReplicaEntry, ReplicaLoad, TableSnapshot

NestedRows = dict[int, dict[int, dict[int, dict[int, RankRow]]]]


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """Readable form of one replica."""

    role: Role
    incarnation: Incarnation
    ready: bool
    load: ReplicaLoad
    ranks: NestedRows
    """Rows by dp, cp, tp and pp rank, in this order."""


class TableReply(msgspec.Struct, frozen=True, kw_only=True):
    """Response of ``GET /table``: the same table twice, nested for people and flat for programs."""

    replicas: dict[ReplicaId, ReplicaView]
    snapshot: TableSnapshot


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Reason why a request was refused."""

    code: str
    """A RefusalCode, or ``bad_request``, ``unauthorized``, ``not_found`` for a request that never reached the table."""
    message: str


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every response with status 4xx."""

    error: ErrorDetail


def view(entry: ReplicaEntry) -> ReplicaView:
    """Return the nested form of one replica."""
    ranks: NestedRows = {}
    for row in entry.rows:
        at = row.coords
        ranks.setdefault(at.dp, {}).setdefault(at.cp, {}).setdefault(at.tp, {})[at.pp] = row
    return ReplicaView(role=entry.role, incarnation=entry.incarnation, ready=entry.ready, load=entry.load, ranks=ranks)
