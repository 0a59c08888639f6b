"""Hidden states on their way through the stages of a replica: from each rank to its like in the next stage."""

from dataclasses import dataclass

from torch import Tensor

from workers.parallel.collectives import Communicator

_SENDER = 0


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A rank's place in its line of stages; by default it is the only one.

    A link is a group of two. Sending does not wait for the other side until two sends are not yet taken.
    """

    before: Communicator | None = None
    after: Communicator | None = None

    @property
    def is_first(self) -> bool:
        """Tokens come in here."""
        return self.before is None

    @property
    def is_last(self) -> bool:
        """Logits come out here."""
        return self.after is None

    @property
    def links(self) -> tuple[Communicator, ...]:
        """The groups of this rank."""
        return tuple(link for link in (self.before, self.after) if link is not None)

    def receive(self, hidden: Tensor) -> Tensor:
        """Fill ``hidden [tokens, hidden]`` with what the stage before has sent; how much follows from the step plan."""
        if self.before is not None:
            self.before.broadcast(hidden, _SENDER)
        return hidden

    def send(self, hidden: Tensor) -> None:
        """Hand hidden states on to the next stage."""
        if self.after is not None:
            self.after.broadcast(hidden.contiguous(), _SENDER)
