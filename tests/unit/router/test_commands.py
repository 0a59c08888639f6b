"""Commands to replicas are sent again to those that do not answer, and fail with their names."""

import asyncio

import pytest

from cluster.spec.ids import Incarnation, Peer
from cluster.spec.messages import Command, CommandResult, Drain
from router.commands import MAX_TIMES, Commands
from router.errors import ApiError
from tests.fakes.dispatching import DECODE, ME, PREFILL


class Replicas:
    """Replicas that answer a command once they have received it a given number of times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers_at: int) -> None:
        monkeypatch.setattr("router.commands.AGAIN_S", 0.001)
        self.commands = Commands(ME, self._send)
        self.received: list[tuple[str, Command]] = []
        self._answers_at = answers_at
        self.refusals: dict[str, str] = {}

    def _send(self, peer: Peer, command: Command) -> None:
        self.received.append((peer.replica, command))
        role = peer.replica.partition("-")[0]
        if self.count(peer) == self._answers_at[role]:
            refusal = self.refusals.get(peer.replica, "")
            taken = CommandResult(
                number=command.number, replica=peer.replica, incarnation=peer.incarnation, refusal=refusal
            )
            asyncio.get_running_loop().call_soon(self.commands.on_result, taken)

    def count(self, peer: Peer) -> int:
        return sum(name == peer.replica for name, _ in self.received)


async def test_only_silent_replicas_get_the_command_again(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Replicas(monkeypatch, prefill=1, decode=3)
    await replicas.commands.give([PREFILL, DECODE], Drain())
    assert (replicas.count(PREFILL), replicas.count(DECODE)) == (1, 3)
    command = Command(number=1, sender=ME, incarnation=DECODE.incarnation, wanted=Drain())
    assert {received for name, received in replicas.received if name == DECODE.replica} == {command}


async def test_silent_replicas_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Replicas(monkeypatch, prefill=1, decode=1000)
    with pytest.raises(ApiError, match=r"^decode-0: no answer to Drain, sent 10 times"):
        await replicas.commands.give([PREFILL, DECODE], Drain())
    assert replicas.count(DECODE) == MAX_TIMES
    replicas.commands.on_result(CommandResult(number=1, replica=DECODE.replica, incarnation=DECODE.incarnation))


async def test_another_incarnation_cannot_answer_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Replicas(monkeypatch, decode=1000)
    given = asyncio.ensure_future(replicas.commands.give([DECODE], Drain()))
    await asyncio.sleep(0)
    later = Incarnation(DECODE.incarnation + 1)
    replicas.commands.on_result(CommandResult(number=1, replica=DECODE.replica, incarnation=later))
    with pytest.raises(ApiError):
        await given


async def test_no_replicas_is_an_immediate_error(monkeypatch: pytest.MonkeyPatch) -> None:
    await Replicas(monkeypatch).commands.give([], Drain())


async def test_refusing_replicas_are_named_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Replicas(monkeypatch, prefill=1, decode=1)
    replicas.refusals = {DECODE.replica: "no room"}
    with pytest.raises(ApiError, match=r"^decode-0: no room; done by prefill-0$"):
        await replicas.commands.give([PREFILL, DECODE], Drain())
