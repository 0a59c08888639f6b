"""State of announced requests and of started steps on one rank.

A step may use tokens that the previous step has sampled but the host has not read yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from msgspec.structs import asdict, replace
from numpy.typing import NDArray
from torch import Tensor

from cluster.spec.ids import Room
from cluster.spec.kv import NO_PAGE
from cluster.spec.sampling import Sampled, TokenLogprobs
from cluster.spec.step_messages import NewRequest, ScheduledRequest
from workers.device import Device, Event
from workers.engine.sampler import PendingSamples
from workers.parallel.collectives import Communicator


class PageTable:
    """Pages of one request in order of position. The array grows in place, so that steps do not copy earlier pages."""

    def __init__(self) -> None:
        self._pages = np.empty(16, dtype=np.int64)
        self._len = 0

    def extend(self, pages: Sequence[int], null_page: int) -> None:
        """Append pages. The null page replaces pages that no token of this request will see."""
        end = self._len + len(pages)
        if end > len(self._pages):
            self._pages = np.concatenate([self._pages, np.empty(max(end, len(self._pages)), dtype=np.int64)])
        self._pages[self._len : end] = [null_page if page == NO_PAGE else page for page in pages]
        self._len = end

    @property
    def all(self) -> NDArray[np.int64]:
        """Return all pages so far. Later calls to ``extend`` do not change the result."""
        return self._pages[: self._len]


class KnownRequest(NewRequest, frozen=True, kw_only=True):
    """Announced request, with the state that a rank adds."""

    tables: list[PageTable]
    """Page tables by lifetime. In a sharded pool, page p is page p // cp of CP rank p % cp."""
    prompt_logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)
    """Log-probabilities of the prompt so far, until the first sample."""

    @classmethod
    def of(cls, request: NewRequest, num_lifetimes: int) -> "KnownRequest":
        return cls(**asdict(request), tables=[PageTable() for _ in range(num_lifetimes)])

    @property
    def pages(self) -> list[list[int]]:
        """Return a copy of the tables, for senders."""
        return [table.all.tolist() for table in self.tables]


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
    """Sampled tokens of a step. Empty on a rank that does not sample."""

    rooms: Sequence[Room] = ()
    pending: PendingSamples | None = None
    """Samples in the order of ``rooms``. None if another TP rank samples."""
    prompt_logprobs: Mapping[Room, list[TokenLogprobs]] = field(default_factory=dict)
    """Prompt log-probabilities to report with each token."""

    def wait(self) -> dict[Room, Sampled]:
        """Wait for every sampled request's token. Call this only once."""
        sampled = dict(zip(self.rooms, self.pending.wait(), strict=True)) if self.pending is not None else {}
        reported = {
            room: replace(sampled[room], prompt_logprobs=reported) for room, reported in self.prompt_logprobs.items()
        }
        return sampled | reported

    def input_of(
        self, scheduled: Sequence[ScheduledRequest], tp: Communicator, device: Device
    ) -> PreviousTokens | None:
        """Return this step's tokens that are inputs of the next step, if any. Every TP rank calls this."""
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
