"""Transport of hidden states through the pipeline stages: from each rank to its counterpart in the next stage."""

from dataclasses import dataclass

from torch import Tensor

from workers.parallel.collectives import Communicator

_SENDER = 0


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Position of a rank in its pipeline; by default it is the only stage.

    A link is a group of two. Sending blocks only while two earlier sends have not been received.
    """

    before: Communicator | None = None
    after: Communicator | None = None

    @property
    def is_first(self) -> bool:
        """Return whether tokens enter here."""
        return self.before is None

    @property
    def is_last(self) -> bool:
        """Return whether logits leave here."""
        return self.after is None

    @property
    def links(self) -> tuple[Communicator, ...]:
        """Return the groups of this rank's links."""
        return tuple(link for link in (self.before, self.after) if link is not None)

    def receive(self, hidden: Tensor) -> Tensor:
        """Fill ``hidden [tokens, hidden]`` from the previous stage; the step plan determines the size."""
        if self.before is not None:
            self.before.broadcast(hidden, _SENDER)
        return hidden

    def send(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage."""
        if self.after is not None:
            self.after.broadcast(hidden.contiguous(), _SENDER)
