"""Limits on all HTTP connections of an event loop: starts of requests, reads, idle connections."""

import asyncio
from functools import partial

import pytest

from cluster.http import crowd as http_crowd
from cluster.http.crowd import MAX_TURNS, Crowd
from tests.fakes.wire import Wire


async def test_only_a_few_requests_start_in_one_pass_of_the_loop() -> None:
    crowd, started = Crowd.of(asyncio.get_running_loop()), list[int]()
    for number in range(2 * MAX_TURNS + 1):
        crowd.take_turn(partial(started.append, number), lambda: "client")
    for most in (MAX_TURNS, 2 * MAX_TURNS, 2 * MAX_TURNS + 1, 2 * MAX_TURNS + 1):
        assert started == list(range(most))
        await asyncio.sleep(0)


async def test_requests_of_later_passes_start_at_once() -> None:
    crowd, started = Crowd.of(asyncio.get_running_loop()), list[int]()
    for number in range(3 * MAX_TURNS):
        crowd.take_turn(partial(started.append, number), lambda: "client")
        assert started[-1] == number
        await asyncio.sleep(0)


async def test_a_request_started_by_another_one_waits_its_turn() -> None:
    crowd, started = Crowd.of(asyncio.get_running_loop()), list[str]()

    def start(name: str, depth: int) -> None:
        started.append(name)
        if depth:
            crowd.take_turn(partial(start, f"{name}+", depth - 1), lambda: "client")

    for name in "abcdef":
        crowd.take_turn(partial(start, name, 1), lambda: "client")
    while len(started) < 12:
        await asyncio.sleep(0)
    assert sorted(started) == sorted([*"abcdef", *(f"{name}+" for name in "abcdef")])


async def test_clients_take_turns() -> None:
    crowd, started = Crowd.of(asyncio.get_running_loop()), list[str]()
    for name in [*"aaaaaaaa", "b", "b", "c"]:
        crowd.take_turn(partial(started.append, name), partial(str, name))
    assert started == [*"aaaa"]
    await asyncio.sleep(0)
    assert started == [*"aaaaabca"]
    await asyncio.sleep(0)
    assert started == [*"aaaaabcabaa"]


async def test_nothing_more_is_read_in_a_pass_whose_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read takes longer than a pass may spend on reading."""
    monkeypatch.setattr(http_crowd, "MAX_READ_S", 1e-9)
    crowd, read = Crowd.of(asyncio.get_running_loop()), list[str]()
    await asyncio.sleep(0)
    crowd._left_s = 1e-9
    for name in [*"aaa", "b", "c"]:
        crowd.read(partial(read.append, name), name)
    for most in ("a", "aa", "aab", "aabc", "aabca", "aabca"):
        assert read == [*most]
        await asyncio.sleep(0)


def test_every_event_loop_has_its_own() -> None:
    async def find() -> Crowd:
        crowd = Crowd.of(asyncio.get_running_loop())
        assert Crowd.of(asyncio.get_running_loop()) is crowd
        crowd.take_turn(lambda: None, lambda: "client")
        return crowd

    assert asyncio.run(find()) is not asyncio.run(find())


def test_the_connection_that_is_idle_for_longest_is_aborted_if_there_are_many() -> None:
    crowd = Crowd()
    crowd.max_idle = 3
    wires = [Wire() for _ in range(4)]
    for wire in wires[:3]:
        crowd.add_idle(wire)
    crowd.forget_idle(wires[0])
    crowd.add_idle(wires[0])
    assert not any(wire.is_aborted for wire in wires)
    crowd.add_idle(wires[3])
    assert [wire.is_aborted for wire in wires] == [False, True, False, False]
