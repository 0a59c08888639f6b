"""Step that has begun on a rank, and the tokens that it samples.

The next step may use these tokens before the host has read them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from cluster.spec.ids import Room
from cluster.spec.sampling import Sampled, TokenLogprobs
from cluster.spec.step_messages import ScheduledRequest
from workers.device import Device, Event
from workers.engine.known_requests import KnownRequest
from workers.engine.sampler import PendingSamples
from workers.parallel.communicator import Communicator


class PreviousTokens(NamedTuple):
    """Tokens sampled by the previous step that are inputs of this step."""

    indices: Tensor
    """Indices in the flattened batch, int64."""
    token_ids: Tensor

    def put_into(self, token_ids: Tensor) -> None:
        """Replace the placeholders in ``token_ids [tokens]``."""
        token_ids[self.indices] = self.token_ids


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens of a step. Empty on a rank whose TP group does not sample."""

    rooms: Sequence[Room] = ()
    pending: PendingSamples | None = None
    """Samples in the order of ``rooms``. None if another TP rank samples."""
    prompt_logprobs: Mapping[Room, list[TokenLogprobs]] = field(default_factory=dict)
    """Prompt log-probabilities to report with the token of each room."""

    def wait(self) -> dict[Room, Sampled]:
        """Wait for every sampled request's token. Call this only once."""
        sampled = dict(zip(self.rooms, self.pending.wait(), strict=True)) if self.pending is not None else {}
        for room, logprobs in self.prompt_logprobs.items():
            sampled[room] = structs.replace(sampled[room], prompt_logprobs=logprobs)
        return sampled

    def input_of(
        self, scheduled: Sequence[ScheduledRequest], tp: Communicator, device: Device
    ) -> PreviousTokens | None:
        """Return tokens sampled by this step that are inputs of the next step, if any. Every TP rank calls this."""
        if not self.rooms or not any(request.input_from_previous_step for request in scheduled):
            return None
        if self.pending is not None:
            token_ids = self.pending.token_ids
        else:
            token_ids = torch.empty(len(self.rooms), dtype=torch.int64, device=device.torch_device)
        tp.broadcast(token_ids, root=0)
        sources = {room: index for index, room in enumerate(self.rooms)}
        begins = accumulate((len(request.token_ids) for request in scheduled), initial=0)
        pairs = [
            (begin, sources[request.room])
            for begin, request in zip(begins, scheduled, strict=False)
            if request.input_from_previous_step
        ]
        indices, sampled = device.put(torch.tensor(pairs, dtype=torch.int64).T.contiguous())
        return PreviousTokens(indices, token_ids[sampled])


class BegunStep(NamedTuple):
    requests: Mapping[Room, KnownRequest]
    """Requests in the step. The next step may release some of them before this step ends."""
    sampled_tokens: SampledTokens
    end: Event | None = None

    @property
    def is_over(self) -> bool:
        """Return whether `wait` would return immediately."""
        if self.end is not None:
            return bool(self.end.query())  # type: ignore[no-untyped-call]
        return self.sampled_tokens.pending is None or self.sampled_tokens.pending.is_there

    def wait(self) -> dict[Room, Sampled]:
        """Wait until the step and its KV writes are complete. Call this only once.

        Returns every sampled request's token on the sampling rank, and nothing on other ranks.
        """
        sampled = self.sampled_tokens.wait()
        if self.end is not None:
            self.end.synchronize()
        return sampled
