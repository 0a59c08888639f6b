"""Admission queue of the router: its order and its timeouts."""

import asyncio
import time
from collections.abc import Callable

import pytest

from router import admission
from router.admission import Gate
from router.answer import Answer
from router.errors import NotReadyError, QueueFullError
from tests.fakes.dispatching import ask


class Replicas:
    """Replicas with capacity for a number of answers."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.opened: list[str] = []
        self.num_left = 0
        self.is_ready = True

    def opener(self, name: str) -> Callable[[], Answer]:
        def open_answer() -> Answer:
            if not self.is_ready:
                raise NotReadyError("draining")
            if len(self.opened) - self.num_left >= self.room:
                raise QueueFullError("full")
            self.opened.append(name)
            return Answer([ask()], lambda _: None, self._leave)

        return open_answer

    def _leave(self, _: object) -> None:
        self.num_left += 1


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_urgent_requests_are_first_then_earlier_ones() -> None:
    gate, replicas = Gate(9, 60.0), Replicas(1)
    with await gate.enter(replicas.opener("a"), 0):
        waiting = [
            asyncio.create_task(gate.enter(replicas.opener(name), priority))
            for name, priority in (("b", 0), ("late", 5), ("c", 0), ("soon", -1))
        ]
        await settle()
        assert (replicas.opened, gate.num_waiting) == (["a"], 4)
    for count in range(2, 6):
        gate.look()
        await settle()
        assert len(replicas.opened) == count
        replicas.num_left += 1
    assert replicas.opened == ["a", "soon", "b", "c", "late"]
    await asyncio.gather(*waiting)
    assert gate.num_waiting == 0


async def test_new_requests_do_not_overtake_waiting_ones() -> None:
    gate, replicas = Gate(9, 60.0), Replicas(0)
    first = asyncio.create_task(gate.enter(replicas.opener("first"), 0))
    await settle()
    replicas.room = 2
    with await gate.enter(replicas.opener("second"), 0):
        assert replicas.opened == ["first", "second"]
    await first


async def test_others_pass_a_large_request_until_they_have_taken_as_much() -> None:
    gate, replicas, is_large_blocked = Gate(99, 60.0), Replicas(99), True

    def open_large() -> Answer:
        if is_large_blocked:
            raise QueueFullError("too large for now")
        return replicas.opener("large")()

    def small(tenant: str, number: int, priority: int = 0) -> asyncio.Task[Answer]:
        opener = replicas.opener(f"{tenant}{number}")
        return asyncio.create_task(gate.enter(opener, priority, tenant, 1.0, 10))

    waiting = [asyncio.create_task(gate.enter(open_large, 0, "m", 1.0, 35))]
    await settle()
    waiting += [small("m", 0), small("a", 9, priority=1), *(small("a", number) for number in range(6))]
    await settle()
    assert replicas.opened == ["a0", "a1", "a2"]
    is_large_blocked = False
    gate.look()
    await asyncio.gather(*waiting)
    assert replicas.opened[3] == "large"
    assert sorted(replicas.opened[4:]) == ["a3", "a4", "a5", "a9", "m0"]


async def test_a_full_queue_and_a_long_wait_are_refused() -> None:
    gate, replicas = Gate(1, 0.01), Replicas(0)
    waiting = asyncio.create_task(gate.enter(replicas.opener("waits"), 0))
    await settle()
    with pytest.raises(QueueFullError, match=r"^full$"):
        await gate.enter(replicas.opener("one too many"), 0)
    with pytest.raises(QueueFullError, match=r"waited 0\.01 s \(router\.max_wait_s\): full"):
        await waiting
    assert gate.num_waiting == 0


async def test_a_flood_costs_another_tenant_at_most_its_share() -> None:
    gate, replicas = Gate(6, 60.0), Replicas(0)
    flood = [asyncio.create_task(gate.enter(replicas.opener(f"m{n}"), 0, "mallory", 1.0, 100)) for n in range(6)]
    await settle()
    others = [asyncio.create_task(gate.enter(replicas.opener(f"a{n}"), 0, "alice", 1.0, 100)) for n in range(2)]
    heavy = asyncio.create_task(gate.enter(replicas.opener("w"), 0, "willy", 2.0, 100))
    await settle()
    dropped = [task for task in flood if task.done()]
    assert dropped == flood[:2:-1][::-1]
    assert [str(task.exception()) for task in dropped] == ["full"] * 3
    replicas.room = 9
    gate.look()
    assert replicas.opened == ["m0", "a0", "w", "m1", "a1", "m2"]
    for task in (*flood[:3], *others, heavy):
        (await task).__exit__(None, None, None)


async def test_disconnected_clients_leave_the_queue() -> None:
    gate, replicas = Gate(9, 60.0), Replicas(0)
    gone = asyncio.create_task(gate.enter(replicas.opener("gone"), 0))
    stays = asyncio.create_task(gate.enter(replicas.opener("stays"), 0))
    await settle()
    gone.cancel()
    await settle()
    replicas.room = 1
    gate.look()
    await stays
    assert replicas.opened == ["stays"]


async def test_an_unclaimed_answer_is_cancelled() -> None:
    gate, replicas = Gate(9, 60.0), Replicas(0)
    gone = asyncio.create_task(gate.enter(replicas.opener("gone"), 0))
    await settle()
    replicas.room = 1
    gate.look()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert (replicas.opened, replicas.num_left) == (["gone"], 1)


async def test_an_error_of_the_first_request_does_not_block_the_rest() -> None:
    gate, replicas = Gate(9, 60.0), Replicas(0)
    waiting = [asyncio.create_task(gate.enter(replicas.opener(name), 0)) for name in "ab"]
    await settle()
    replicas.is_ready = False
    gate.look()
    for task in waiting:
        with pytest.raises(NotReadyError):
            await task


async def test_an_answer_is_not_lost_if_the_wait_ends_in_the_same_pass() -> None:
    gate, replicas = Gate(9, 0.05), Replicas(0)
    waiting = asyncio.create_task(gate.enter(replicas.opener("late"), 0))

    def have_room() -> None:
        replicas.room = 1
        gate.look()

    loop = asyncio.get_running_loop()
    loop.call_later(0.01, time.sleep, 0.1)
    loop.call_later(0.03, have_room)
    with await waiting:
        assert (replicas.opened, replicas.num_left) == (["late"], 0)
    assert replicas.num_left == 1


async def test_other_work_comes_between_many_admissions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_LOOK_S", 0.0)
    gate, replicas = Gate(99, 60.0), Replicas(0)
    waiting = [asyncio.create_task(gate.enter(replicas.opener(name), 0)) for name in "abcde"]
    await settle()
    replicas.room, opened = 9, list[int]()
    gate.look()
    for _ in range(6):
        opened.append(len(replicas.opened))
        gate.look()  # as more room comes
        await asyncio.sleep(0)
    assert opened == [1, 2, 3, 4, 5, 5]
    for task in waiting:
        (await task).__exit__(None, None, None)
