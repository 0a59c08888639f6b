"""Defects of the router."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from cluster.spec.ids import Peer, Room
from cluster.spec.messages import KvEvents, Submit
from router.directory import Breakers, LoadBook
from router.dispatch import RequestTable
from router.page_index import PageIndex
from router.request import Action, ChoiceId, GenerateRequest, Pick, Placement

Patch = pytest.MonkeyPatch


def reuse_a_room(patch: Patch) -> None:
    """The router numbers its open requests, and reuses the numbers of ended ones."""
    make = RequestTable.__init__

    def make_with_numbers(
        self: RequestTable, me: Peer, load: LoadBook, breakers: Breakers, pick: Pick, _: object, max_unanswered: int
    ) -> None:
        def draw() -> Room:
            return next(
                room for room in map(Room, count(1)) if not (self.is_open(ChoiceId(room)) or self.is_under_way(room))
            )

        make(self, me, load, breakers, pick, draw, max_unanswered=max_unanswered)

    patch.setattr(RequestTable, "__init__", make_with_numbers)


def ignore_gaps_in_kv_events(patch: Patch) -> None:
    """The router ignores the numbers of KV event messages."""
    on_kv_events = PageIndex.on_kv_events

    def take(self: PageIndex, events: KvEvents, now_s: float) -> Peer | None:
        known = self._known.get((events.replica, events.incarnation))
        if known is not None and known.next_number is not None and events.number:
            known.next_number = events.number
        return on_kv_events(self, events, now_s)

    patch.setattr(PageIndex, "on_kv_events", take)


def continue_at_output_0(patch: Patch) -> None:
    """A continued request sends its output as part of the prompt, so output positions restart at 0."""
    make = GenerateRequest.make_submit

    def submit_as_prompt(self: GenerateRequest, *others: Any) -> Submit:
        return replace(make(self, *others), num_given=0)

    patch.setattr(GenerateRequest, "make_submit", submit_as_prompt)


def restart_at_the_original_prompt(patch: Patch) -> None:
    """A continued request sends its original prompt."""
    make = GenerateRequest.make_submit

    def submit_first_prompt(self: GenerateRequest, *others: Any) -> Submit:
        return replace(make(self, *others), prompt_ids=self.prompt_ids)

    patch.setattr(GenerateRequest, "make_submit", submit_first_prompt)


def retry_in_the_same_room(patch: Patch) -> None:
    begin = RequestTable._begin

    def begin_in_first_room(self: RequestTable, request: GenerateRequest, _room: Room, *others: Any) -> list[Action]:
        return begin(self, request, Room(request.choice_id), *others)

    patch.setattr(RequestTable, "_begin", begin_in_first_room)


def cancel_no_other_target(patch: Patch) -> None:
    """The router does not cancel the other replica when one fails."""
    leave = RequestTable._leave

    def exit_silently(self: RequestTable, request: GenerateRequest, _cancelled: Sequence[Peer]) -> list[Action]:
        return leave(self, request, [])

    patch.setattr(RequestTable, "_leave", exit_silently)


def retry_where_it_failed(patch: Patch) -> None:
    begin = RequestTable._begin

    def begin_there(
        self: RequestTable, request: GenerateRequest, room: Room, now_s: float, *others: Any
    ) -> list[Action]:
        first = firsts.get(request.choice_id) or self._pick(request, room, frozenset(), now_s)
        firsts[request.choice_id] = first
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "_pick", lambda *_: first)
            return begin(self, request, room, now_s, *others)

    firsts: dict[ChoiceId, Placement | None] = {}
    patch.setattr(RequestTable, "_begin", begin_there)


def never_inquire(patch: Patch) -> None:
    patch.setattr(RequestTable, "_inquire", lambda _self, _now_s: [])


def inquire_for_ever(patch: Patch) -> None:
    """The router waits for a decode replica that answers others, but not its inquiries."""
    inquire = RequestTable._inquire

    def inquire_without_counting(self: RequestTable, now_s: float) -> list[Action]:
        for request in self._open.values():
            request.num_unanswered = 0
        return inquire(self, now_s)

    patch.setattr(RequestTable, "_inquire", inquire_without_counting)


def answer_no_inquiry(patch: Patch) -> None:
    patch.setattr(RequestTable, "on_inquire", lambda _self, _inquire: [])
