"""A step that was begun: what it draws, which the next one may follow before anybody has read it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from cluster.spec.ids import Room
from cluster.spec.sampling import Sampled, TokenLogprobs
from cluster.spec.step_messages import ScheduledRequest
from workers.device import Moment, on_device
from workers.engine.known_request import KnownRequest
from workers.engine.sampler import Draws
from workers.parallel.collectives import Communicator


class Followed(NamedTuple):
    """Tokens of a step that the one before has drawn."""

    places: Tensor
    """Where they belong in the flattened batch, int64."""
    token_ids: Tensor

    def put_into(self, token_ids: Tensor) -> None:
        """Replace what stands for them in ``token_ids [tokens]``."""
        token_ids[self.places] = self.token_ids


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step draws; of no rows on a rank that does not know of any."""

    rooms: Sequence[Room] = ()
    draws: Draws | None = None
    """Of these rooms, in their order; None where another TP rank draws them."""
    prompt_logprobs: Mapping[Room, list[TokenLogprobs]] = field(default_factory=dict)
    """Where they are told with the token."""

    def wait(self) -> dict[Room, Sampled]:
        """The token of every sampled row, once."""
        sampled = dict(zip(self.rooms, self.draws.wait(), strict=True)) if self.draws is not None else {}
        told = {room: replace(sampled[room], prompt_logprobs=told) for room, told in self.prompt_logprobs.items()}
        return sampled | told

    def followed(self, rows: Sequence[ScheduledRequest], tp: Communicator, device: torch.device) -> Followed | None:
        """What the rows of the next step take from this one; None for nothing. Every TP rank calls this."""
        if not self.rooms or not any(row.input_from_previous_step for row in rows):
            return None
        if self.draws is not None:
            drawn = self.draws.token_ids
        else:
            drawn = torch.empty(len(self.rooms), dtype=torch.int64, device=device)
        tp.broadcast(drawn, root=0)
        sources = {room: place for place, room in enumerate(self.rooms)}
        begins = accumulate((len(row.token_ids) for row in rows), initial=0)
        pairs = [
            (begin, sources[row.room]) for begin, row in zip(begins, rows, strict=False) if row.input_from_previous_step
        ]
        places, of_rows = on_device(torch.tensor(pairs, dtype=torch.int64).T.contiguous(), device)
        return Followed(places, drawn[of_rows])


class BegunStep(NamedTuple):
    """A step that this rank has begun."""

    requests: Mapping[Room, KnownRequest]
    """Those in it, as they were: the next step may have forgotten some before this one ends."""
    drawn: Drawn
    end: Moment = None

    @property
    def is_over(self) -> bool:
        """Whether nobody would wait for it."""
        if self.end is not None:
            return bool(self.end.query())  # type: ignore[no-untyped-call]
        return self.drawn.draws is None or self.drawn.draws.is_there

    def wait(self) -> dict[Room, Sampled]:
        """The token of every sampled row on the rank that draws, and nothing on the others; once.

        The step is over then: nothing of it has yet to be written to pages.
        """
        sampled = self.drawn.wait()
        if self.end is not None:
            self.end.synchronize()
        return sampled
