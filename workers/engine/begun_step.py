"""Steps under way, and their sampled tokens, which the next step may use before the host reads them."""

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
from workers.device import Event, on_device
from workers.engine.known_request import KnownRequest
from workers.engine.sampler import Draws
from workers.parallel.collectives import Communicator


class PreviousTokens(NamedTuple):
    """Tokens sampled by the previous step that this one takes as input."""

    indices: Tensor
    """Indices in the flattened batch, int64."""
    token_ids: Tensor

    def put_into(self, token_ids: Tensor) -> None:
        """Replace their placeholders in ``token_ids [tokens]``."""
        token_ids[self.indices] = self.token_ids


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens of a step; empty on a rank that samples none."""

    rooms: Sequence[Room] = ()
    draws: Draws | None = None
    """Samples of these rooms, in order; None if another TP rank samples."""
    prompt_logprobs: Mapping[Room, list[TokenLogprobs]] = field(default_factory=dict)
    """Prompt log-probabilities to report with the token."""

    def wait(self) -> dict[Room, Sampled]:
        """Wait for the token of every sampled request; call once."""
        sampled = dict(zip(self.rooms, self.draws.wait(), strict=True)) if self.draws is not None else {}
        reported = {
            room: replace(sampled[room], prompt_logprobs=reported) for room, reported in self.prompt_logprobs.items()
        }
        return sampled | reported

    def input_of(
        self, scheduled: Sequence[ScheduledRequest], tp: Communicator, device: torch.device
    ) -> PreviousTokens | None:
        """Return the tokens of this step that the next one takes as input; None for none. Every TP rank calls this."""
        if not self.rooms or not any(request.input_from_previous_step for request in scheduled):
            return None
        if self.draws is not None:
            token_ids = self.draws.token_ids
        else:
            token_ids = torch.empty(len(self.rooms), dtype=torch.int64, device=device)
        tp.broadcast(token_ids, root=0)
        sources = {room: index for index, room in enumerate(self.rooms)}
        begins = accumulate((len(request.token_ids) for request in scheduled), initial=0)
        pairs = [
            (begin, sources[request.room])
            for begin, request in zip(begins, scheduled, strict=False)
            if request.input_from_previous_step
        ]
        indices, sampled = on_device(torch.tensor(pairs, dtype=torch.int64).T.contiguous(), device)
        return PreviousTokens(indices, token_ids[sampled])


class BegunStep(NamedTuple):
    """Step that this rank has started."""

    requests: Mapping[Room, KnownRequest]
    """Requests of the step as they were at its start; the next step may release some before this one ends."""
    sampled_tokens: SampledTokens
    end: Event | None = None

    @property
    def is_over(self) -> bool:
        """Return whether `wait` would not block."""
        if self.end is not None:
            return bool(self.end.query())  # type: ignore[no-untyped-call]
        return self.sampled_tokens.draws is None or self.sampled_tokens.draws.is_there

    def wait(self) -> dict[Room, Sampled]:
        """Wait for the step and return the token of every sampled request on the sampling rank, nothing on others;
        call once.

        Afterwards all KV writes of the step are complete.
        """
        sampled = self.sampled_tokens.wait()
        if self.end is not None:
            self.end.synchronize()
        return sampled
