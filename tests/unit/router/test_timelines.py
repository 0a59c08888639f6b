"""Router processes ask each other for timelines: one that has it gives it, and none waits for ever."""

import asyncio

import pytest

from cluster.spec.ids import Incarnation, ReplicaId, Room
from cluster.spec.messages import Gathered, Message, Timeline
from cluster.spec.step_messages import GiveTimeline
from cluster.spec.timeline import Interval, read_clock
from router import timelines
from router.errors import NoAnswerError
from router.timelines import Timelines
from tests.fakes.bootstrap import entry_of, peer_of

ROOM, ATTEMPT = Room(7), Room(8)
ROW = entry_of(peer_of("prefill-0", address="rank")).rows[0]
WORDS = [Interval("request", "stream", 1.0, 2.0)]
PART = Timeline(
    room=ATTEMPT,
    replica=ReplicaId("prefill-0"),
    incarnation=Incarnation(1),
    global_rank=0,
    clock=read_clock(),
    intervals=[],
    num_left_out=0,
)


class Processes:
    """Two that hear each other, unless told otherwise; ranks hear nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(timelines, "GATHER_S", 0.05)
        monkeypatch.setattr(timelines, "AGAIN_S", 0.01)
        self.sent: list[tuple[str, Message]] = []
        self.is_deaf = False
        self.is_gone = False
        self.ours = Timelines("ours", self._tell, lambda: {} if self.is_gone else self.theirs.told())
        self.theirs = Timelines("theirs", self._tell, lambda: self.ours.told())

    def _tell(self, address: str, message: Message) -> None:
        self.sent.append((address, message))
        match message:
            case GiveTimeline() if address == "theirs" and not self.is_deaf:
                self.theirs.on_ask(message)
            case GiveTimeline() if address == "ours":
                self.ours.on_ask(message)
            case Gathered():
                {"ours": self.ours, "theirs": self.theirs}[address].on_gathered(message)

    def num_sent(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for address, message in self.sent if address != "rank")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(monkeypatch)


async def test_both_give_what_one_has(processes: Processes) -> None:
    processes.theirs.begin(ROOM, ATTEMPT, [ROW])
    processes.theirs.end(ROOM, WORDS)
    assert processes.sent == [("rank", GiveTimeline(room=ATTEMPT, reply_to="theirs"))]
    waiting = [asyncio.ensure_future(each.gather("7")) for each in (processes.ours, processes.ours, processes.theirs)]
    await asyncio.sleep(0.02)
    processes.theirs.on_timeline(PART)
    whole = Gathered(room=ROOM, timelines=[PART], missing=[], router=WORDS)
    assert await asyncio.gather(*waiting) == [whole] * 3
    assert processes.num_sent(Gathered) == 1, "asked twice and again and again meanwhile"
    assert await processes.ours.gather("7") == whole, "it can be asked for more than once"


async def test_what_is_missing_elsewhere_is_named(processes: Processes) -> None:
    processes.theirs.begin(ROOM, ATTEMPT, [ROW])
    processes.theirs.end(ROOM, WORDS)
    assert await processes.ours.gather("7") == Gathered(
        room=ROOM, timelines=[], missing=["prefill-0 rank 0"], router=WORDS
    )


@pytest.mark.parametrize("name", ["8", "07", "x", ""])
async def test_of_what_nobody_knows_nobody_is_asked(processes: Processes, name: str) -> None:
    processes.theirs.begin(ROOM, ATTEMPT, [])
    assert await processes.ours.gather(name) is None
    assert not processes.sent


async def test_who_does_not_answer_is_not_waited_for_for_ever(processes: Processes) -> None:
    processes.theirs.begin(ROOM, ATTEMPT, [])
    processes.is_deaf = True
    with pytest.raises(NoAnswerError, match=r"^the router process that has timeline 7 did not answer in 0.07 s$"):
        await processes.ours.gather("7")


async def asked_in_vain(processes: Processes) -> asyncio.Task[Gathered | None]:
    """A question whose first message the other process does not take."""
    processes.theirs.begin(ROOM, ATTEMPT, [])
    processes.is_deaf = True
    waiting = asyncio.create_task(processes.ours.gather("7"))
    await asyncio.sleep(0)
    return waiting


async def test_who_is_gone_is_not_waited_for(processes: Processes) -> None:
    waiting = await asked_in_vain(processes)
    processes.is_gone = True
    assert await waiting is None
    assert processes.num_sent(GiveTimeline) == 1


async def test_a_lost_question_is_asked_again(processes: Processes) -> None:
    waiting = await asked_in_vain(processes)
    processes.is_deaf = False
    assert await waiting is not None


async def test_a_question_is_not_passed_on(processes: Processes) -> None:
    processes.theirs.begin(ROOM, ATTEMPT, [])
    processes.ours.on_ask(GiveTimeline(room=ROOM, reply_to="theirs"))
    await asyncio.sleep(0.02)
    assert not processes.sent
