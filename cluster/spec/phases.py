"""Times of a request's phases, as its replicas report them to the router."""

from cluster.spec.clock import ClockReading
from cluster.spec.ids import ReplicaId
from cluster.spec.wire import Struct

SAME_MACHINE = ClockReading(machine="", unix_offset_s=0.0)
"""Clock of processes that share one."""


class ComputedStep(Struct, frozen=True, array_like=True):
    """Step in which a replica computed a part of a prompt, perhaps together with other requests."""

    start_s: float
    end_s: float
    communication_s: float = 0.0
    """Time that the sampling rank spent in collectives. It does not overlap with computation."""


class PromptTimes(Struct, frozen=True, kw_only=True):
    """Times of one prompt at the replica that computes it, on the monotonic clock of its leader."""

    replica: ReplicaId
    clock: ClockReading = SAME_MACHINE
    stored_s: float
    """Time at which all else was ready, and the request waited only for pages from storage."""
    scheduled_s: float
    """Time at which the step scheduler got the request."""
    steps: list[ComputedStep]

    @property
    def seconds(self) -> float:
        """Return the time from ``scheduled_s`` to the end of the last step."""
        return self.steps[-1].end_s - self.scheduled_s if self.steps else 0.0


class PhaseTimes(Struct, frozen=True, kw_only=True):
    """Times of one request up to its first token, on the monotonic clock of the decode leader."""

    decode: ReplicaId
    clock: ClockReading = SAME_MACHINE
    granted_s: float
    """Time at which pages were allocated."""
    sent_s: float
    """Time at which the first token was sent to the router."""
    prompt: PromptTimes

    @property
    def prefill(self) -> ReplicaId | None:
        """Prefill replica; None if decode computed the prompt itself."""
        return self.prompt.replica if self.prompt.replica != self.decode else None
