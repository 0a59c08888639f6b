"""Defects of layerwise sends and loads, of unequal TP and PP, and of window attention."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from cluster.channel import send_or_log
from cluster.spec.ids import Room
from cluster.spec.kv import NO_PAGE
from cluster.spec.step_messages import CancelSend, SendReport, StepPlan
from cluster.spec.tiers import TierPage
from cluster.spec.transfer_messages import SendState
from transfer.page_assignment import PagePair, PageShare
from transfer.page_range import PageRange, Span
from transfer.receiver import ReceiverSession
from transfer.sender import SendJob, Write
from workers.cache.lifetimes import Lifetimes
from workers.cache.page_allocator import Demand, PageAllocator
from workers.handoff.kv_sender import KvSender, OutgoingRequest, _Transfer
from workers.hicache.copier import Copier
from workers.hicache.tiers import Tiers
from workers.memory.layerwise_load import LayerwiseLoad
from workers.scheduler.decode import DecodeLeader
from workers.scheduler.decode_queue import DecodeQueue
from workers.scheduler.holders import PageHolders
from workers.scheduler.sequence import TokenSequence

Patch = pytest.MonkeyPatch


def accept_any_count(patch: Patch) -> None:
    """Decode ignores the number of pages and bytes."""
    patch.setattr(ReceiverSession, "_mismatch", lambda _self, _result: None)


def send_layers_before_they_are_computed(patch: Patch) -> None:
    """A layer counts as stored as soon as the preceding layer is."""
    on_stored = KvSender._on_stored

    def one_early(self: KvSender, plan: StepPlan, requests: Mapping[Room, OutgoingRequest], layer: int) -> None:
        if layer + 1 < self._record.layout.num_layers:
            on_stored(self, plan, requests, layer + 1)

    patch.setattr(KvSender, "_on_stored", one_early)


def skip_the_last_layers(patch: Patch) -> None:
    """The final send of a step skips the last layer if it sends only some layers."""
    patch.setattr("workers.handoff.kv_sender._writes", _writes_without_last)


def _writes_without_last(parts: Sequence[Any]) -> list[Write]:
    return [Write(rank.endpoint, _without_last(source).spans_to(target)) for rank, source, target in parts]


def _without_last(source: PageRange) -> PageRange:
    layers, stage = source.layers, source.layout.layers
    assert layers is not None
    is_rest = layers.start > stage.start and layers.stop == stage.stop
    return dataclasses.replace(source, layers=layers[:-1] if is_rest else layers)


def skip_the_last_layers_and_ignore_counts(patch: Patch) -> None:
    """Decode also ignores the number of bytes."""
    skip_the_last_layers(patch)
    accept_any_count(patch)


def send_the_first_layers_again(patch: Patch) -> None:
    make = KvSender._job

    def forgetful(self: KvSender, transfer: _Transfer, *given: Any) -> SendJob:
        job = make(self, transfer, *given)
        transfer.num_layers_sent = 0
        return job

    patch.setattr(KvSender, "_job", forgetful)


def count_pages_with_their_first_layers(patch: Patch) -> None:
    """A page counts as sent when its first layers are, and decode ignores the number of bytes."""
    make = KvSender._job

    def count(self: KvSender, transfer: _Transfer, pairs: list[PagePair], end: int | None) -> SendJob:
        session = transfer.session
        if end is None:
            return make(self, transfer, pairs, end)
        session.advance([range(1 << 20)] * len(session.destination.pages), session.destination.num_tokens)
        return dataclasses.replace(make(self, transfer, pairs, end), num_pages=len(pairs))

    patch.setattr(KvSender, "_job", count)
    accept_any_count(patch)


def report_drained_early(patch: Patch) -> None:
    """A rank reports that it has drained while its writer continues."""

    def cancel(self: KvSender, message: CancelSend) -> None:
        rank = self._record.global_rank
        report = SendReport(room=message.room, sender_rank=rank, state=SendState.DRAINED)
        send_or_log(self._outbox, self._prefill.address, report)

    patch.setattr(KvSender, "cancel", cancel)


def resume_after_a_failure(patch: Patch) -> None:
    """A failed transfer restarts with the next layers."""
    patch.setattr(KvSender, "_is_outgoing", lambda _self, request: request.destination is not None)


def read_layers_before_they_are_loaded(patch: Patch) -> None:
    patch.setattr(LayerwiseLoad, "num_here", 1 << 30)


def announce_a_layer_too_many(patch: Patch) -> None:
    """A layer counts as loaded as soon as the preceding layer is."""
    add = LayerwiseLoad.add

    def add_two(self: LayerwiseLoad, num_layers: int, event: Any) -> None:
        add(self, num_layers if self._events else num_layers + 1, event)

    patch.setattr(LayerwiseLoad, "add", add_two)


def load_one_head_of_peers(patch: Patch) -> None:
    """Only the first head is loaded from pages in peers' memory."""
    spans = Copier._spans

    def of_first_head(self: Copier, page: TierPage, layers: range | None) -> list[Span]:
        return spans(self, page, layers)[:1]

    patch.setattr(Copier, "_spans", of_first_head)


def load_other_layers_of_peers(patch: Patch) -> None:
    """Layers of pages in peers' memory are read at the first layers' offsets."""
    spans = Copier._spans

    def shifted(self: Copier, page: TierPage, layers: range | None) -> list[Span]:
        wanted = spans(self, page, layers)
        if layers is None:
            return wanted
        first = spans(self, page, self._record.layout.layers[: len(layers)])
        return [span._replace(source_offset=other.source_offset) for span, other in zip(wanted, first, strict=False)]

    patch.setattr(Copier, "_spans", shifted)


def send_pages_to_the_next_copy(patch: Patch) -> None:
    """Each of the decode ranks with the same head gets its neighbor's pages."""
    patch.setattr(PageShare, "has", lambda self, page: (page + 1) % self.num_copies in self.remainders)


def send_all_pages_to_each_copy(patch: Patch) -> None:
    patch.setattr(PageShare, "has", lambda _self, _page: True)


def skip_head_copies(patch: Patch) -> None:
    """Ranks with the same heads do not copy each other's received pages."""
    next_plan = DecodeLeader.next_plan

    def without_received_pages(self: DecodeLeader) -> StepPlan | None:
        plan = next_plan(self)
        return plan and replace(plan, received_pages=[])

    patch.setattr(DecodeLeader, "next_plan", without_received_pages)


def count_layers_from_the_first_stage(patch: Patch) -> None:
    """A stage counts layers from its own first one."""

    def writes(parts: Sequence[Any]) -> list[Write]:
        return [Write(rank.endpoint, _from_first(source).spans_to(target)) for rank, source, target in parts]

    patch.setattr("workers.handoff.kv_sender._writes", writes)


def _from_first(source: PageRange) -> PageRange:
    layers, first = source.layers, source.layout.first_layer
    assert layers is not None
    return dataclasses.replace(source, layers=range(layers.start - first, layers.stop - first))


def swap_heads(patch: Patch) -> None:
    """A sender uses a head's offset in its own pool as the offset in decode's pool."""

    spans_to = PageRange.spans_to

    def same_offset(self: PageRange, target: PageRange) -> list[Span]:
        source_bytes, target_bytes = self.layout.page_bytes, target.layout.page_bytes
        return [
            span._replace(target_offset=span.target_offset // target_bytes * target_bytes + at)
            for span in spans_to(self, target)
            for at in [span.source_offset % source_bytes % max(1, target_bytes - span.num_bytes + 1)]
        ]

    patch.setattr(PageRange, "spans_to", same_offset)


def free_visible_pages(patch: Patch) -> None:
    """A sequence frees pages one page too early."""
    first_pages, free_unseen = Lifetimes.first_pages, PageHolders.free_unseen

    def one_page_further(self: Lifetimes, num_tokens: int) -> list[int]:
        return first_pages(self, num_tokens + self.page_size)

    def free_early(self: PageHolders, sequence: TokenSequence) -> None:
        with pytest.MonkeyPatch.context() as early:
            early.setattr(Lifetimes, "first_pages", one_page_further)
            free_unseen(self, sequence)

    patch.setattr(PageHolders, "free_unseen", free_early)


def continue_without_the_window(patch: Patch) -> None:
    """A cached prefix is used although its window has been evicted."""

    def chain_alone(_self: Lifetimes, keys: Sequence[bytes], num_known: int, has: Callable[[bytes], bool]) -> int:
        return next((at for at in range(num_known, len(keys)) if not has(keys[at])), len(keys))

    patch.setattr(Lifetimes, "longest_prefix", chain_alone)
    find = PageAllocator.find

    def find_any(self: PageAllocator, keys: Sequence[bytes], *given: Any) -> list[list[int]]:
        whole, *others = find(self, keys, *given)
        return [whole, *([*filter(NO_PAGE.__ne__, pages), *whole][: len(whole)] for pages in others)]

    patch.setattr(PageAllocator, "find", find_any)


def skip_loading_the_window(patch: Patch) -> None:
    """The pages of the window are not loaded from host memory."""
    load = Tiers.load

    def load_chain(
        self: Tiers, prefix: Sequence[bytes], pages: Sequence[TierPage], *given: Any, **settings: Any
    ) -> int:
        return load(self, prefix, [page for page in pages if page.lifetime == 0], *given, **settings)

    patch.setattr(Tiers, "load", load_chain)


def use_the_first_lifetime_for_all_pages(patch: Patch) -> None:
    """Copies between tiers always use the layers without a window."""
    patch.setattr(TierPage, "lifetime", 0)


def reserve_too_little_of_a_window(patch: Patch) -> None:
    """Decode reserves one page of the window too few, and prefill accepts the ticket."""
    first_pages = Lifetimes.first_pages

    def short(self: Lifetimes, num_tokens: int) -> list[int]:
        whole, *others = first_pages(self, num_tokens)
        most = max(0, -(-num_tokens // self.page_size) - 1)
        return [whole, *(min(first + 1, most) for first in others)]

    grant = DecodeQueue._demands

    def demand(self: DecodeQueue, *given: Any) -> list[Demand]:
        with pytest.MonkeyPatch.context() as little:
            little.setattr(Lifetimes, "first_pages", short)
            return grant(self, *given)

    patch.setattr(DecodeQueue, "_demands", demand)
    patch.setattr("workers.scheduler.prefill.ticket_refusal", lambda *_given: None)
