"""What an operator may order of a running cluster; struct names are tags on the wire to the driver."""

import msgspec

from cluster.spec.ids import ReplicaId


class _Order(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frozen, keyword-only."""


class DrainOrder(_Order, frozen=True):
    """A replica takes no new requests until it is resumed or started again; over when its open ones have ended."""

    replica: ReplicaId
    grace_s: float | None = None
    """Longest wait for open requests; `router.drain_s` by default, as in the other orders."""


class ResumeOrder(_Order, frozen=True):
    """A replica takes new requests again."""

    replica: ReplicaId


class RestartOrder(_Order, frozen=True):
    """Replicas finish their open requests and start again."""

    replicas: tuple[ReplicaId, ...] = ()
    """All that run by default."""
    is_rolling: bool = False
    """One after the other, each only while another one of its role takes requests."""
    grace_s: float | None = None


class ScaleOrder(_Order, frozen=True):
    """Another number of replicas: new ones start, those with the highest numbers finish their requests and go."""

    prefill: int | None = None
    """None leaves the number as it is."""
    decode: int | None = None
    grace_s: float | None = None


class TellOrder(_Order, frozen=True):
    """Say which members do not run, and why; one line each. Changes nothing, and waits for no other order."""


Order = DrainOrder | ResumeOrder | RestartOrder | ScaleOrder | TellOrder
