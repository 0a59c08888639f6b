"""Defects of early sends, layerwise loads, and unequal TP and PP, as those of whole pages are in ``defects``."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from cluster.spec.ids import Room
from cluster.spec.kv import PoolLayout
from cluster.spec.step_messages import DropSend, SendReport, StepPlan
from cluster.spec.tiers import TierPage
from cluster.spec.transfer_messages import SendState
from transfer.plan import PagePair, PageShare, Span, make_spans
from transfer.receiver_session import ReceiverSession
from transfer.sender import SendJob, Write
from transfer.sender_session import SenderSession
from workers.cache.layer_arrivals import LayerArrivals
from workers.hicache.copier import Copier
from workers.kv_sender import Known, KvSender
from workers.post import send_if_heard
from workers.scheduler.decode import DecodeLeader

Patch = pytest.MonkeyPatch


def expect_any_number(patch: Patch) -> None:
    """Decode does not look at how many pages and bytes came."""
    patch.setattr(ReceiverSession, "_mismatch", lambda _self, _result: None)


def send_layers_before_they_are_computed(patch: Patch) -> None:
    """A layer counts as stored when the one before it is."""
    on_stored = KvSender._on_stored

    def one_early(self: KvSender, plan: StepPlan, requests: Mapping[Room, Known], layer: int) -> None:
        if layer + 1 < self._row.layout.num_layers:
            on_stored(self, plan, requests, layer + 1)

    patch.setattr(KvSender, "_on_stored", one_early)


def forget_the_last_layers(patch: Patch) -> None:
    """What is sent when the step is over lacks the last layer, if others have left before."""
    patch.setattr("workers.kv_sender._writes", _writes_without_last)


def _writes_without_last(mine: PoolLayout, parts: Sequence[Any], layers: slice) -> list[Write]:
    first, last = mine.first_layer + layers.start, mine.first_layer + layers.stop
    last -= layers.start > 0 and layers.stop == mine.num_layers
    return [
        Write(target.endpoint, make_spans(mine, target.layout, part, first_layer=first, last_layer=last))
        for target, part in parts
    ]


def forget_the_last_layers_and_count_none(patch: Patch) -> None:
    """And decode does not look at how many bytes came."""
    forget_the_last_layers(patch)
    expect_any_number(patch)


def send_the_first_layers_again(patch: Patch) -> None:
    """Nobody remembers which layers have left, and decode takes any number of bytes."""
    make = KvSender._job

    def forgetful(self: KvSender, session: SenderSession, *given: Any) -> SendJob:
        job = make(self, session, *given)
        self._num_gone.clear()
        return job

    patch.setattr(KvSender, "_job", forgetful)


def count_pages_with_their_first_layers(patch: Patch) -> None:
    """A page counts as sent when its first layers are, and decode takes any number of bytes."""
    make = KvSender._job

    def count(self: KvSender, session: SenderSession, pairs: list[PagePair], end: int | None = None) -> SendJob:
        if end is None:
            return make(self, session, pairs)
        session.advance(range(1 << 20), session.target.num_tokens)
        return dataclasses.replace(make(self, session, pairs, end), num_pages=len(pairs))

    patch.setattr(KvSender, "_job", count)
    expect_any_number(patch)


def report_drained_at_once(patch: Patch) -> None:
    """A rank that is to stop says that it has, while its writer goes on."""

    def drop(self: KvSender, message: DropSend) -> None:
        rank = self._row.global_rank
        report = SendReport(room=message.room, generation=message.generation, sender_rank=rank, state=SendState.DRAINED)
        send_if_heard(self._outbox, self._prefill.address, report)

    patch.setattr(KvSender, "drop", drop)


def begin_again_after_a_failure(patch: Patch) -> None:
    """A transfer that has failed begins anew with the next layers."""
    patch.setattr(KvSender, "_is_sent", lambda _self, admit: admit.target is not None)


def read_layers_before_they_are_loaded(patch: Patch) -> None:
    """A step does not wait for layers that are loaded meanwhile."""
    patch.setattr(LayerArrivals, "num_here", 1 << 30)


def announce_a_layer_too_many(patch: Patch) -> None:
    """A layer counts as loaded when the one before it is."""
    note = LayerArrivals.note

    def note_two(self: LayerArrivals, num_layers: int, moment: Any) -> None:
        note(self, num_layers if self._moments else num_layers + 1, moment)

    patch.setattr(LayerArrivals, "note", note_two)


def load_one_head_of_peers(patch: Patch) -> None:
    """Of the pages in peers' memory, layers of the first head are loaded alone."""
    spans = Copier._spans

    def of_first_head(self: Copier, page: TierPage, layers: slice) -> list[Span]:
        return spans(self, page, layers)[:1]

    patch.setattr(Copier, "_spans", of_first_head)


def load_other_layers_of_peers(patch: Patch) -> None:
    """Of the pages in peers' memory, each layer is taken from where the next head's would be."""
    spans = Copier._spans

    def shifted(self: Copier, page: TierPage, layers: slice) -> list[Span]:
        first = spans(self, page, slice(0, layers.stop - layers.start))
        return [
            span._replace(source_offset=other.source_offset)
            for span, other in zip(spans(self, page, layers), first, strict=True)
        ]

    patch.setattr(Copier, "_spans", shifted)


def send_pages_to_the_next_copy(patch: Patch) -> None:
    """Of decode ranks that hold the same head, each gets the pages of its neighbour."""
    patch.setattr(PageShare, "has", lambda self, page: (page + 1) % self.num_copies in self.turns)


def send_all_pages_to_each_copy(patch: Patch) -> None:
    """Every decode rank is sent all pages of its heads."""
    patch.setattr(PageShare, "has", lambda _self, _page: True)


def give_no_copies(patch: Patch) -> None:
    """Ranks that hold the same heads do not give each other what has arrived."""
    next_plan = DecodeLeader.next_plan

    def without_arrived(self: DecodeLeader) -> StepPlan | None:
        plan = next_plan(self)
        return plan and replace(plan, arrived=[])

    patch.setattr(DecodeLeader, "next_plan", without_arrived)


def count_layers_from_the_first_stage(patch: Patch) -> None:
    """A stage takes its own first layer for the model's."""

    def writes(mine: PoolLayout, parts: Sequence[Any], layers: slice) -> list[Write]:
        first, last = layers.start, layers.stop
        return [
            Write(target.endpoint, make_spans(mine, target.layout, part, first_layer=first, last_layer=last))
            for target, part in parts
        ]

    patch.setattr("workers.kv_sender._writes", writes)


def swap_heads(patch: Patch) -> None:
    """A sender takes the place of a head in its own pool for that in decode's."""

    def same_place(source: PoolLayout, target: PoolLayout, pages: Any, **given: Any) -> list[Span]:
        return [
            span._replace(target_offset=span.target_offset // target.page_bytes * target.page_bytes + at)
            for span in make_spans(source, target, pages, **given)
            for at in [span.source_offset % source.page_bytes % (target.page_bytes - span.num_bytes + 1)]
        ]

    patch.setattr("workers.kv_sender.make_spans", same_place)
