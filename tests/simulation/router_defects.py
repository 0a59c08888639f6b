"""Defects that can be put into the real router, as those of the rest are in ``defects``."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from cluster.spec.config import RouterConfig
from cluster.spec.ids import Peer, Room
from cluster.spec.messages import KvEvents, Submit
from router.directory import Breakers, LoadBook
from router.dispatch import RequestTable
from router.page_index import PageIndex
from router.request import Action, GenerateRequest, Pick, Placement, RequestId

Patch = pytest.MonkeyPatch


def reuse_a_room(patch: Patch) -> None:
    """The router numbers its open requests, and gives the numbers of those that have ended to others."""
    make = RequestTable.__init__

    def make_with_numbers(
        self: RequestTable, me: Peer, config: RouterConfig, load: LoadBook, breakers: Breakers, pick: Pick, _: object
    ) -> None:
        def draw() -> Room:
            return next(
                room for room in map(Room, count(1)) if not (self.is_open(RequestId(room)) or self.is_under_way(room))
            )

        make(self, me, config, load, breakers, pick, draw)

    patch.setattr(RequestTable, "__init__", make_with_numbers)


def ignore_gaps_in_kv_events(patch: Patch) -> None:
    """The router does not look at the numbers of page reports."""
    on_kv_events = PageIndex.on_kv_events

    def take(self: PageIndex, events: KvEvents, now_s: float) -> bool:
        known = self._known.get((events.replica, events.incarnation))
        if known is not None and known.next_number is not None and events.number:
            known.next_number = events.number
        return on_kv_events(self, events, now_s)

    patch.setattr(PageIndex, "on_kv_events", take)


def continue_at_output_0(patch: Patch) -> None:
    """What the client has is sent as a longer prompt: output positions begin anew."""
    make = GenerateRequest.make_submit

    def submit_as_prompt(self: GenerateRequest, *others: Any) -> Submit:
        return replace(make(self, *others), num_given=0)

    patch.setattr(GenerateRequest, "make_submit", submit_as_prompt)


def begin_anew_behind_given_tokens(patch: Patch) -> None:
    """A request that goes on elsewhere is sent as it was at first."""
    make = GenerateRequest.make_submit

    def submit_first_prompt(self: GenerateRequest, *others: Any) -> Submit:
        return replace(make(self, *others), prompt_ids=self.prompt_ids)

    patch.setattr(GenerateRequest, "make_submit", submit_first_prompt)


def retry_in_the_same_room(patch: Patch) -> None:
    """All attempts of a request meet in one room."""
    begin = RequestTable._begin

    def begin_in_first_room(self: RequestTable, request: GenerateRequest, _room: Room, *others: Any) -> list[Action]:
        return begin(self, request, Room(request.request_id), *others)

    patch.setattr(RequestTable, "_begin", begin_in_first_room)


def cancel_no_other_target(patch: Patch) -> None:
    """When one replica fails, the other is left to find out by itself."""
    leave = RequestTable._leave

    def leave_without_a_word(self: RequestTable, request: GenerateRequest, _cancelled: Sequence[Peer]) -> list[Action]:
        return leave(self, request, [])

    patch.setattr(RequestTable, "_leave", leave_without_a_word)


def retry_where_it_failed(patch: Patch) -> None:
    """A request takes the replicas that it had, whatever has become of them."""
    begin = RequestTable._begin

    def begin_there(
        self: RequestTable, request: GenerateRequest, room: Room, now_s: float, *others: Any
    ) -> list[Action]:
        first = firsts.get(request.request_id) or self._pick(request, room, frozenset(), now_s)
        firsts[request.request_id] = first
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "_pick", lambda *_: first)
            return begin(self, request, room, now_s, *others)

    firsts: dict[RequestId, Placement | None] = {}
    patch.setattr(RequestTable, "_begin", begin_there)


def never_inquire(patch: Patch) -> None:
    """The router waits for its deadline, whatever was lost."""
    patch.setattr(RequestTable, "_inquire", lambda _self, _now_s: [])


def answer_no_inquiry(patch: Patch) -> None:
    """Nobody tells a leader a second time what is over."""
    patch.setattr(RequestTable, "on_inquire", lambda _self, _inquire: [])
